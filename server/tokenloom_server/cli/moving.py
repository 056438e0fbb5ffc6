"""``tokenloom restore`` and ``tokenloom fork``: where the next launch of a run starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from tokenloom_server.cli.common import ControlTokenFile, RunName, TlsCa, TlsCert, TlsKey, Url, console, fail
from tokenloom_server.errors import ConfigError, TokenloomError

app = typer.Typer()


@app.command()
def restore(
    url: Url,
    run: RunName = None,
    snapshot: Annotated[
        str | None, typer.Option(help="The id of a snapshot that was saved in the ledger.", show_default=False)
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="A sample index: where the trainer's checkpoint stands.", show_default=False),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="A file with a snapshot, or with what state_dict() gave, as JSON.", show_default=False),
    ] = None,
    skip_samples: Annotated[
        int, typer.Option(min=0, help="Samples behind that point that are not delivered: a bad range.")
    ] = 0,
    skip_tokens: Annotated[int, typer.Option(min=0, help="The same in tokens, rounded up to whole samples.")] = 0,
    token_file: ControlTokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Pin where the next launch of the trainers starts, and what it jumps over behind that point.

    Nothing moves until that launch joins. A trainer that brings a state of its own has to bring this one; another is
    refused. Samples to skip are those of the order right behind it, such as a range at which the loss went up: they
    count as skipped, not as consumed, and the launch begins behind them.
    """
    from tokenloom_server.tools.remote import Remote

    try:
        if [snapshot, sample, state].count(None) != 2:
            raise ConfigError("give one of --snapshot, --sample and --state")
        if skip_samples and skip_tokens:
            raise ConfigError("give at most one of --skip-samples and --skip-tokens")
        remote = Remote(
            url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, control=True
        )
        name = remote.only_run(run)
        asked: dict[str, str | int] = {"skip_samples": skip_samples, "skip_tokens": skip_tokens}
        if snapshot is not None:
            asked["snapshot_id"] = snapshot
        elif sample is not None:
            asked["sample_index"] = sample
        elif state is not None:
            asked["snapshot"] = _snapshot_text(state)
        point = remote.restore(name, **asked)
    except TokenloomError as error:
        fail(error)
    out = console()
    out.print(
        f"{name}: the next launch resumes from sample {point.sample_index:,} (digest {point.digest})", highlight=False
    )
    if point.skipped_samples:
        out.print(
            f"samples {point.sample_index:,} to {point.start_index - 1:,} are skipped: it begins at sample "
            f"{point.start_index:,}",
            highlight=False,
        )


@app.command()
def fork(
    url: Url,
    run: Annotated[str, typer.Option(help="The new run; its mixture file is served already.")],
    parent: Annotated[
        str | None,
        typer.Option("--from", help="The run that it begins from, served there, too.", show_default=False),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="Where that run stood; what it has committed if not given.", show_default=False),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --from: a file with its snapshot, or with what state_dict() gave, as JSON.",
            show_default=False,
        ),
    ] = None,
    token_file: ControlTokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Begin a run where another one stands: a branch off one checkpoint, with a mixture of its own.

    Sources that both mixtures have go on where they stood; others begin at their first row. Sample index, tokens and
    rolling digest go on. The first launch of the new run then joins without a state; in a trainer,
    RemoteDataset(…, fork_from=state_dict) does the same.
    """
    from tokenloom_server.tools.remote import Remote

    try:
        if (parent is None) == (state is None):
            raise ConfigError("give one of --from and --state")
        remote = Remote(
            url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, control=True
        )
        text = _snapshot_text(state) if state is not None else None
        point = remote.fork(run, parent=parent, sample_index=sample, snapshot=text)
    except TokenloomError as error:
        fail(error)
    console().print(
        f"{run}: begins at sample {point.sample_index:,} (digest {point.digest}), with the first launch",
        highlight=False,
    )


def _snapshot_text(path: Path) -> str:
    """The text of a snapshot out of a file that holds it, or what ``state_dict()`` gave as JSON."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--state {path}: expected a snapshot as JSON ({error})") from None
    if isinstance(document, dict) and isinstance(document.get("tokenloom"), str):
        return str(document["tokenloom"])
    return text.strip()

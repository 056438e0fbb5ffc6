"""``tokenloom restore``: where the next launch of a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import say
from tokenloom_tools.cli.options import ControlAccess, Inside, Url, snapshot_text


def restore(
    url: Url,
    snapshot: Annotated[
        str | None, typer.Option(help="The id of a snapshot that was saved in the ledger.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="A sample index: where the trainer's checkpoint stands."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="A checkpoint, whatever tokenloom checkpoint reads.")
    ] = None,
    inside: Inside = None,
    skip_samples: Annotated[
        int,
        typer.Option(min=0, help="Samples after that point that are not delivered: a bad range."),
    ] = 0,
    skip_tokens: Annotated[
        int, typer.Option(min=0, help="The same in tokens, rounded up to whole samples.")
    ] = 0,
    undo_skip: Annotated[
        bool,
        typer.Option(
            "--undo-skip", help="Take back the skips that the state at that point did not pass."
        ),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Take back what is pinned, and pin nothing.")
    ] = False,
    *,
    access: ControlAccess,
) -> None:
    """Pin where the next launch starts, and which samples it skips there.

    Nothing moves until that launch joins. A trainer that brings a state of its own has to bring this one; another is
    refused. Samples to skip are those of the order right after it, such as a range at which the loss went up: every
    launch that comes there passes over them, and they count as skipped, not as consumed.
    """
    server = access.connect(url)
    name = server.only_run()
    if cancel:
        server.cancel_restore(name)
        say(f"{name}: nothing is pinned any more; the next launch resumes from where it asks to")
        return
    if [snapshot, sample, state].count(None) != 2:
        raise ConfigError("give one of --snapshot, --sample and --state")
    if skip_samples and skip_tokens:
        raise ConfigError("give at most one of --skip-samples and --skip-tokens")
    point = server.restore(
        name,
        snapshot_id=snapshot,
        sample_index=sample,
        snapshot=None if state is None else snapshot_text(state, inside),
        skip_samples=skip_samples,
        skip_tokens=skip_tokens,
        undo_skip=undo_skip,
    )
    say(
        f"{name}: the next launch resumes from sample {point.sample_index:,} (digest {point.digest})"
    )
    if point.skips is not None:
        # Not at the top: the models of reports take pydantic, and --help of every command would wait for it.
        from tokenloom_server.reports.stats import skips_text

        say(f"from then on, what the order passes over: {skips_text(point.skips)}")

"""``tokenloom restore``: where the next launch of a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenloom_server.cli.common import say
from tokenloom_server.cli.options import ControlAccess, Inside, RunName, Url, snapshot_text
from tokenloom_server.errors import ConfigError


def restore(
    url: Url,
    run: RunName = None,
    snapshot: Annotated[str | None, typer.Option(help="The id of a snapshot that was saved in the ledger.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="A sample index: where the trainer's checkpoint stands.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="A checkpoint, whatever tokenloom checkpoint show reads.")] = None,
    inside: Inside = None,
    skip_samples: Annotated[
        int, typer.Option(min=0, help="Samples after that point that are not delivered: a bad range.")
    ] = 0,
    skip_tokens: Annotated[int, typer.Option(min=0, help="The same in tokens, rounded up to whole samples.")] = 0,
    *,
    access: ControlAccess,
) -> None:
    """Pin where the next launch of the trainers starts, and what it jumps over after that point.

    Nothing moves until that launch joins. A trainer that brings a state of its own has to bring this one; another is
    refused. Samples to skip are those of the order right after it, such as a range at which the loss went up: they
    count as skipped, not as consumed, and the launch begins after them.
    """
    if [snapshot, sample, state].count(None) != 2:
        raise ConfigError("give one of --snapshot, --sample and --state")
    if skip_samples and skip_tokens:
        raise ConfigError("give at most one of --skip-samples and --skip-tokens")
    server = access.connect(url)
    name = server.only_run(run)
    point = server.restore(
        name,
        snapshot_id=snapshot,
        sample_index=sample,
        snapshot=None if state is None else snapshot_text(state, inside),
        skip_samples=skip_samples,
        skip_tokens=skip_tokens,
    )
    say(f"{name}: the next launch resumes from sample {point.sample_index:,} (digest {point.digest})")
    if point.skipped_samples:
        say(
            f"samples {point.sample_index:,} to {point.start_index - 1:,} are skipped: it begins at sample "
            f"{point.start_index:,}"
        )

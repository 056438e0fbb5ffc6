"""``tokenloom fork``: a run that begins where another one stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import say
from tokenloom_tools.cli.options import ControlAccess, Inside, Url, snapshot_text


def fork(
    url: Url,
    parent: Annotated[
        str | None, typer.Option("--from", help="The run that it begins from, served there, too.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, help="Where that run stood; what it has committed if not given."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --from: its checkpoint, whatever tokenloom checkpoint reads."
        ),
    ] = None,
    inside: Inside = None,
    *,
    access: ControlAccess,
) -> None:
    """Branch the run of URL off another run's checkpoint, with a mixture of its own.

    Sources that both mixtures have go on where they stood; others begin at their first row. Sample index, tokens and
    rolling digest go on. The first launch of the new run then joins without a state; in a trainer,
    RemoteDataset(…, launch=LaunchOptions(fork_from=state_dict)) does the same.
    """
    if (parent is None) == (state is None):
        raise ConfigError("give one of --from and --state")
    server = access.connect(url)
    run = server.only_run()
    snapshot = None if state is None else snapshot_text(state, inside)
    point = server.fork(run, parent=parent, sample_index=sample, snapshot=snapshot)
    say(
        f"{run}: begins at sample {point.sample_index:,} (digest {point.digest}), with the first launch"
    )

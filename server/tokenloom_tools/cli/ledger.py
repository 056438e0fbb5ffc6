"""``tokenloom ledger``: what keeps a ledger's data safe, and moves them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from tokenloom_server.errors import ConfigError, TokenloomError

from tokenloom_tools.cli.command import command
from tokenloom_tools.cli.output import console, say, set_up_logging

if TYPE_CHECKING:
    from tokenloom_server.ledger.base import Ledger

_T = TypeVar("_T")

app = typer.Typer(
    name="ledger",
    help="Back up, restore, check and move a ledger, SQLite or Redis, by the URL that serve --ledger takes.",
    no_args_is_help=True,
)
_URL = (
    "The ledger's URL, such as sqlite:///tokenloom.db (relative to this folder) or redis://host:6379/0; or the name of "
    "an environment variable that holds it, such as TOKENLOOM_LEDGER: there others do not see a password."
)
_Url = Annotated[str, typer.Argument(help=_URL, metavar="LEDGER")]
_Run = Annotated[str | None, typer.Option(help="This run alone; all, if not given.")]


@contextmanager
def _ledger(url: str, *, must_exist: bool = True) -> Iterator[Ledger]:
    """Opens a ledger, and says what it logs. One that is written to is checked before: raises ``LedgerUnsafe``. Where
    that is refused, no file stays that was not there before."""
    from tokenloom_server.ledger.open import open_ledger

    set_up_logging("warning")
    with closing(
        open_ledger(os.environ.get(url, url), Path.cwd(), must_exist=must_exist)
    ) as ledger:
        try:
            if not must_exist:
                ledger.check()
            yield ledger
        except BaseException:
            with suppress(TokenloomError):
                ledger.abandon()
            raise


def _tracked(runs: Iterable[_T]) -> Iterable[_T]:
    """With a bar on a terminal."""
    from rich.progress import track

    return track(
        runs, "runs", console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


@command(app, "backup")
def back_up(
    ledger: _Url,
    file: Annotated[
        Path, typer.Argument(help="The file to write, mode 0600; there must be none of this name.")
    ],
    *,
    run: _Run = None,
) -> None:
    """Save all runs of a ledger in one file, each as it is at one moment; servers may go on serving meanwhile.

    The file is written whole or not at all. What a server keeps beside the ledger (its history) is not in it.
    """
    from tokenloom_tools import ledger as runs_of

    with _ledger(ledger) as opened:
        names = runs_of.run_names(opened, run)
        runs_of.back_up(opened, _tracked(names), file)
        say(f"{file}: {len(names)} run(s) of {opened.description}, {file.stat().st_size:,} bytes")


@command(app, "restore")
def restore_backup(
    file: Annotated[Path, typer.Argument(help="A file that `tokenloom ledger backup` wrote.")],
    ledger: _Url,
    *,
    run: _Run = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Replace runs that the ledger has; what these have more is lost."
        ),
    ] = False,
) -> None:
    """Write the runs of a backup to a ledger: one without them, or with --replace in place of those that are there.

    Stop their servers before. All launches of before are over: start the servers, then the training jobs again from
    their last checkpoints, which may be newer than the backup. One without a checkpoint is refused, never guessed.
    """
    from tokenloom_tools.ledger import restore

    with _ledger(ledger, must_exist=False) as opened:
        for contents in _tracked(restore(file, run, opened, replace=replace)):
            stored = contents.run
            index = stored.committed.sample_index if stored.committed is not None else 0
            pin = "; where its next launch was pinned to begin is left out" if stored.pin else ""
            say(f"run {stored.name}, stream {stored.stream}: at sample {index}{pin}")


@command(app, "copy")
def copy_ledger(
    source: Annotated[str, typer.Argument(help=_URL, metavar="FROM")],
    target: Annotated[
        str, typer.Argument(help="The ledger to move them to, in the same way.", metavar="TO")
    ],
    *,
    run: _Run = None,
) -> None:
    """Move all runs to another ledger, SQLite or Redis. Stop their servers before: a run that is served is refused.

    The old ledger keeps them, and says to every server that asks where they are now. Then start the servers with
    --ledger TO: training goes on where it was. If this is interrupted, run it again.
    """
    from tokenloom_tools.ledger import copy_run, run_names

    with _ledger(source) as old, _ledger(target, must_exist=False) as new:
        if old.description == new.description:
            raise ConfigError(f"FROM and TO are both {old.description}; name two ledgers")
        for name, stream in _tracked(run_names(old, run)):
            is_moved = copy_run(old, new, name, stream)
            say(
                f"run {name}, stream {stream}: {'is' if is_moved else 'was already'} in {new.description}"
            )


@command(app, "check")
def check_ledger(ledger: _Url, *, run: _Run = None) -> None:
    """Read everything that a ledger holds, and name each fault with its run and what to do; status 1 where one is.

    Checks counters against states, openings, journal, revisions, snapshots, keys or rows of no run, and whether the
    store may lose what it acknowledges. Data files are not read. A run that is served may be checked.
    """
    from tokenloom_tools.ledger import run_faults, run_names, store_faults

    with _ledger(ledger) as opened:
        faults = [*store_faults(opened)]
        names = run_names(opened, run)
        for name in _tracked(names):
            faults += run_faults(opened, *name)
        for fault in faults:
            say(f"fault: {fault}")
        say(f"{opened.description}: {len(names)} run(s), {len(faults)} fault(s)")
    if faults:
        raise typer.Exit(1)

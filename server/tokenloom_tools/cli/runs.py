"""``tokenloom runs``: the runs of a server, added, reloaded and removed while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenloom_tools.cli.command import command
from tokenloom_tools.cli.common import print_json, say
from tokenloom_tools.cli.options import ControlAccess, ReadAccess, Url
from tokenloom_tools.cli.revision import user_name

app = typer.Typer(
    name="runs",
    help="The runs of a server: list, add, reload and remove them while it serves.",
    no_args_is_help=True,
)

_Reason = Annotated[
    str | None,
    typer.Option(
        help="Where the mixture differs from the one in force, make that a revision, for this reason."
    ),
]
_Run = Annotated[
    str, typer.Argument(help="The run's name, or that of its file where it could not be read.")
]


@command(app, "list")
def list_runs(
    url: Url,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
    *,
    access: ReadAccess,
) -> None:
    """List the runs of a server, and the mixtures that it could not bring up or reload, with what is wrong."""
    from tokenloom_tools.reports.stats_text import line_of

    server = access.connect(url)
    listed = server.list_runs()
    if as_json:
        print_json(listed.model_dump())
        return
    for stats in server.stats(None):
        say(line_of(stats))
    for broken in listed.broken:
        state = (
            "served as it was; its mixture file was not taken" if broken.served else "not served"
        )
        say(f"{broken.run}: {state} ({broken.origin}): {broken.error}: {broken.message}")


@command(app)
def add(
    url: Url,
    mixture: Annotated[
        Path, typer.Argument(help="A mixture file on the server's machine.", metavar="MIXTURE.yaml")
    ],
    reason: _Reason = None,
    *,
    access: ControlAccess,
) -> None:
    """Add a run to a server, beside those that it serves.

    A run that the ledger knows goes on where it was. Whether it is there again after a restart of the server, the
    answer says.
    """
    added = access.connect(url).add_run(
        file=str(mixture.absolute()), reason=reason, author=user_name()
    )
    say(f"{added.run}: added, from {added.origin}. {added.note}")


@command(app)
def remove(url: Url, run: _Run, *, access: ControlAccess) -> None:
    """Remove a run from a server. Its trainers end with an error that says so; the ledger keeps the run."""
    removed = access.connect(url).remove_run(run)
    say(f"{removed.run}: removed; the ledger keeps it. {removed.note}")


@command(app)
def reload(url: Url, run: _Run, reason: _Reason = None, *, access: ControlAccess) -> None:
    """Have a server read the mixture file of a run again.

    A run that could not be brought up is tried again. What differs from the mixture in force is refused, unless a
    reason makes it a revision. Trainers go on, or wait for a moment.
    """
    reloaded = access.connect(url).reload_run(run, reason=reason, author=user_name())
    say(f"{reloaded.run}: reloaded, from {reloaded.origin}. {reloaded.note}")

"""``tokenloom runs``: the runs of a server, added, reloaded and removed while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import print_json, say
from tokenloom_tools.cli.options import ControlAccess, Url
from tokenloom_tools.cli.revision import user_name

if TYPE_CHECKING:
    from tokenloom_tools.remote import Remote


def runs(
    url: Url,
    add: Annotated[
        Path | None,
        typer.Option(
            help="Add a run, of this mixture file on the server's machine. One that the ledger knows goes on where it "
            "was.",
            metavar="MIXTURE.yaml",
        ),
    ] = None,
    reload: Annotated[
        str | None,
        typer.Option(
            help="Have the mixture file of this run read again; one that could not be brought up is tried again. "
            "Trainers go on, or wait for a moment.",
            metavar="RUN",
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            help="Remove this run. Its trainers end with an error that says so; the ledger keeps the run.",
            metavar="RUN",
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            help="Where the mixture differs from the one in force, make that a revision, for this reason; else it is "
            "refused."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
    *,
    access: ControlAccess,
) -> None:
    """List a server's runs, and mixtures that it cannot serve, with the reason; or add, reload or remove a run.

    Whether an added run is there again after a restart of the server, the answer says. A run is called as its file
    where that could not be read.
    """
    server, why = access.connect(url), {"reason": reason, "author": user_name()}
    if [add, reload, remove].count(None) < 2:
        raise ConfigError("give at most one of --add, --reload and --remove")
    if reason is not None and add is None and reload is None:
        raise ConfigError("--reason goes with --add or --reload")
    if as_json and (add or reload or remove):
        raise ConfigError(
            "--json prints the list of runs: leave it out, or --add, --reload or --remove"
        )
    if add is not None:
        done, text = server.add_run(file=str(add.absolute()), **why), "added, from {}"
    elif reload is not None:
        done, text = server.reload_run(reload, **why), "reloaded, from {}"
    elif remove is not None:
        done, text = server.remove_run(remove), "removed; the ledger keeps it"
    else:
        _list(server, as_json)
        return
    say(f"{done.run}: {text.format(done.origin)}. {done.note}")


def _list(server: Remote, as_json: bool) -> None:
    from tokenloom_tools.reports.terminal import line_of

    listed = server.list_runs()
    if as_json:
        print_json(listed.model_dump())
        return
    for stats in server.stats():
        say(line_of(stats))
    for broken in listed.broken:
        state = (
            "served as it was; its mixture file was not taken" if broken.served else "not served"
        )
        say(f"{broken.run}: {state} ({broken.origin}): {broken.error}: {broken.message}")

"""``tokenloom mixture undo``: a revision taken back, before production reaches it."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.common import console
from tokenloom_server.cli.options import ControlAccess, RunName, Url

app = typer.Typer()


@command(app)
def undo(
    url: Url,
    number: Annotated[int, typer.Argument(min=1, help="The revision's number.", metavar="NUMBER", show_default=False)],
    run: RunName = None,
    *,
    access: ControlAccess,
) -> None:
    """Take back a revision, and all after it, none of which production has reached."""
    from tokenloom_server.reports.mixture_text import print_revision

    server = access.connect(url)
    name = server.only_run(run)
    for revision in server.drop_revisions(name, number):
        print_revision(console(), name, revision, "was taken back; it was to hold")

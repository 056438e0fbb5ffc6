"""``tokenloom mixture exclude``: rows that are left out."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.mixture.revision import RevisionOptions
from tokenloom_server.cli.options import ControlAccess, Url

app = typer.Typer()


@command(app)
def exclude(
    url: Url,
    file: Annotated[
        str,
        typer.Argument(
            help="JSON lines, or CSV with a header: spec (or alias), shard, row. The path is the server's, and the "
            "file has to stay there as it is.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Leave rows out from then on: take-downs, duplicates that were found late."""
    revision.make(url, access, {"exclude": {"file": file}})

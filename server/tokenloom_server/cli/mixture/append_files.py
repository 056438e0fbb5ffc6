"""``tokenloom mixture append-files``: files that appeared since the run began."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.mixture.revision import RevisionOptions
from tokenloom_server.cli.options import ControlAccess, Url

app = typer.Typer()


@command(app, "append-files")
def append_files(
    url: Url,
    sources: Annotated[
        list[str], typer.Argument(help="Aliases or specs of sources.", metavar="SOURCE...", show_default=False)
    ],
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Read files, too, that match a source's spec and appeared since the run began: after those that it has."""
    revision.make(url, access, {"append_files": sources})

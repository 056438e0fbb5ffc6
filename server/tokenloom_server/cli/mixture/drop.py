"""``tokenloom mixture drop``: sources and nodes that leave."""

from __future__ import annotations

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.mixture.revision import Children, RevisionOptions
from tokenloom_server.cli.options import ControlAccess, Url

app = typer.Typer()


@command(app)
def drop(url: Url, children: Children, revision: RevisionOptions, access: ControlAccess) -> None:
    """Let sources or nodes leave the mixture; their counters stay."""
    revision.make(url, access, {"drop": children})

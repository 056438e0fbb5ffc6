"""``tokenloom mixture pause`` and ``resume``: sources and nodes that give nothing for a while."""

from __future__ import annotations

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.mixture.revision import Children, RevisionOptions
from tokenloom_server.cli.options import ControlAccess, Url

app = typer.Typer()


@command(app)
def pause(url: Url, children: Children, revision: RevisionOptions, access: ControlAccess) -> None:
    """Have sources or nodes give nothing until they are resumed; their siblings take over their share."""
    revision.make(url, access, {"set": [{"child": child, "paused": True} for child in children]})


@command(app)
def resume(url: Url, children: Children, revision: RevisionOptions, access: ControlAccess) -> None:
    """Let what was paused go on where it stood; it does not catch up."""
    revision.make(url, access, {"set": [{"child": child, "paused": False} for child in children]})

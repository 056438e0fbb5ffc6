"""``tokenloom mixture apply``: the mixture of a mixture file, taken over as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.mixture.revision import RevisionOptions
from tokenloom_server.cli.options import ControlAccess, Url

app = typer.Typer()


@command(app)
def apply(
    url: Url,
    mixture: Annotated[
        Path,
        typer.Argument(help="A mixture file, of which mixture: is taken.", metavar="MIXTURE.yaml", show_default=False),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Take over the whole mixture of a mixture file, once its changes were shown and agreed to.

    Sources are known by their specs, nodes by their aliases. What the file does not have any more is dropped.
    """
    from tokenloom_server.catalog import allowed_plugins, open_catalog
    from tokenloom_server.config import mixture_file as config
    from tokenloom_server.order.mixture_content import as_file

    run_config = config.load(mixture, open_catalog(allowed_plugins()))
    revision.make(url, access, {"mixture": as_file(run_config)}, run=run_config.run, ask=not yes)

"""``tokenloom mixture show``: the mixture in force, and what changes it."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.common import console, print_json
from tokenloom_server.cli.options import ReadAccess, RunName, Url

app = typer.Typer()


@command(app)
def show(
    url: Url,
    run: RunName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the mixture in force as a mixture file has it.")
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Show the mixture in force, what is paused and dropped, and all phases and revisions, those to come, too."""
    from tokenloom_server.reports import mixture_text

    server = access.connect(url)
    info = server.mixture(server.only_run(run))
    if as_json:
        print_json(info.model_dump())
    elif as_yaml:
        print(mixture_text.as_yaml(info), end="")
    else:
        mixture_text.print_mixture(console(), info)

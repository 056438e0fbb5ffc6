"""``tokenloom stats``: the mix of a running server, in figures."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_tools.cli.common import console, print_json, say
from tokenloom_tools.cli.options import ReadAccess, Url


def stats(
    url: Url,
    every_source: Annotated[
        bool, typer.Option("--all", help="Show each source also where there are many.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the documents as JSON, one a line.")
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Show a run's mix: shares, rows, tokens, epochs, ranks; if a server has several runs, a line for each."""
    from tokenloom_tools.reports.terminal import line_of, print_stats

    documents = access.connect(url).stats()
    for document in documents:
        if as_json:
            print_json(document.model_dump())
        elif len(documents) > 1:
            say(line_of(document))
        else:
            print_stats(console(), document, every_source=every_source)
    if len(documents) > 1 and not as_json:
        say(f"{url}/RUN shows one of them")

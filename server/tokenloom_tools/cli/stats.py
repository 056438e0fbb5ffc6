"""``tokenloom stats``: the mix of a running server, in figures."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_tools.cli.common import console, print_json
from tokenloom_tools.cli.options import ReadAccess, Url


def stats(
    url: Url,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the documents as JSON, one a line.")
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Show the mix of a running server, or of one run of it: shares, rows, tokens, epochs, ranks."""
    from tokenloom_tools.reports.stats_text import print_stats

    for document in access.connect(url).stats():
        if as_json:
            print_json(document.model_dump())
        else:
            print_stats(console(), document)

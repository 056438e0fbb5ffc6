"""``tokenloom report``: what a model card needs to say about a run's data."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_tools.cli.common import print_document, print_json
from tokenloom_tools.cli.options import ReadAccess, Url


def report(
    url: Url,
    run: Annotated[str | None, typer.Option(help="The run, where the server has several.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json/--markdown", help="As JSON, or as Markdown.")
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Write what a model card needs to say about a run's data: sources, tokens, epochs, digests, launches."""
    from tokenloom_tools.reports.model_card import markdown

    server = access.connect(url)
    document = server.report(server.only_run(run))
    if as_json:
        print_json(document.model_dump())
    else:
        print_document(markdown(document))

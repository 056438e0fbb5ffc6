"""``tokenloom mixture add``: a new source."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.mixture.revision import RevisionOptions, parse_number, parse_weight
from tokenloom_server.cli.options import ControlAccess, Url

app = typer.Typer()


@command(app)
def add(
    url: Url,
    spec: Annotated[
        str,
        typer.Argument(
            help="The new source, such as parquet:data/crawl2-*.parquet:text; paths are the server's. One that was "
            "dropped goes on where it stood.",
            metavar="SPEC",
            show_default=False,
        ),
    ],
    to: Annotated[str, typer.Option(help="The node that gets it: its alias or place.")] = "mixture",
    weight: Annotated[
        str | None, typer.Option(help="Its share among its siblings, as for set.", show_default=False)
    ] = None,
    alias: Annotated[str | None, typer.Option(help="A short name.", show_default=False)] = None,
    epochs: Annotated[
        str | None, typer.Option(help="How often it is read: a number, or inf.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="At most so many tokens, such as 500M.", show_default=False)
    ] = None,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Add a source; its share is its own from the first sample on, without catching up."""
    from tokenloom_server.core.amounts import parse_amount

    child: dict[str, Any] = {"source": spec}
    if alias is not None:
        child["alias"] = alias
    if weight is not None:
        child["weight"] = parse_weight(weight)
    if epochs is not None:
        child["epochs"] = parse_number(epochs, "--epochs")
    if max_tokens is not None:
        child["max_tokens"] = parse_amount(max_tokens, "--max-tokens")
    revision.make(url, access, {"add": [{"child": child, "to": to}]})

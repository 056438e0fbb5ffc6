"""``tokenloom mixture set``: the weight, policy, epochs, limits or alias of a source or node."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenloom_server.cli.command import command
from tokenloom_server.cli.mixture.revision import RevisionOptions, parse_number, parse_weight
from tokenloom_server.cli.options import ControlAccess, Url

app = typer.Typer()


@command(app, "set")
def set_child(
    url: Url,
    child: Annotated[
        str,
        typer.Argument(
            help="A source or node: its alias or spec, or its place, such as mixture.children.2.",
            metavar="CHILD",
            show_default=False,
        ),
    ],
    weight: Annotated[
        str | None,
        typer.Option(
            help="Its share among its siblings; below a schedule also points TOKENS:WEIGHT, such as 0:1,2B:0.1.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Of a node: another policy.", show_default=False)] = None,
    epochs: Annotated[
        str | None, typer.Option(help="How often it is read: a number, or inf.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="At most so many tokens of the run, such as 500M; or none.", show_default=False)
    ] = None,
    on_exhausted: Annotated[
        str | None, typer.Option(help="drop or stop; of a source also none: as its node says.", show_default=False)
    ] = None,
    unit: Annotated[str | None, typer.Option(help="Of a weighted node: tokens or samples.", show_default=False)] = None,
    interpolate: Annotated[str | None, typer.Option(help="Of a schedule: linear or step.", show_default=False)] = None,
    alias: Annotated[str | None, typer.Option(help="Another short name.", show_default=False)] = None,
    *,
    revision: RevisionOptions,
    access: ControlAccess,
) -> None:
    """Set a source's or node's weight, policy, epochs, limits or alias."""
    from tokenloom_server.core.amounts import parse_amount

    texts = {"policy": policy, "unit": unit, "interpolate": interpolate, "alias": alias}
    fields: dict[str, Any] = {field: text for field, text in texts.items() if text is not None}
    if weight is not None:
        fields["weight"] = parse_weight(weight)
    if epochs is not None:
        fields["epochs"] = parse_number(epochs, "--epochs")
    if max_tokens is not None:
        fields["max_tokens"] = None if max_tokens == "none" else parse_amount(max_tokens, "--max-tokens")
    if on_exhausted is not None:
        fields["on_exhausted"] = None if on_exhausted == "none" else on_exhausted
    revision.make(url, access, {"set": [{"child": child, **fields}]})

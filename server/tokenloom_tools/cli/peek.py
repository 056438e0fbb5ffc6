"""``tokenloom peek``: a run's samples, as the model sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tokenloom_tools.cli.common import console, print_json
from tokenloom_tools.cli.options import ReadAccess, Url

if TYPE_CHECKING:
    from tokenloom_tools.peek.stream import PeekView


#: Lines of fewer characters have no room for counts beside the text, and for so much of a source's name.
_WIDE, _NAME = 100, 20


def peek(
    url: Url,
    at: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The sample index to begin at, such as a trainer's sample_index before a loss spike; where the "
            "ledger stands if not given.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=10_000, help="How many samples.")] = 8,
    text: Annotated[
        bool, typer.Option("--text", help="Print the whole text of each sample.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the samples as JSON, one a line, with ids, text and digest."
        ),
    ] = False,
    *,
    access: ReadAccess,
) -> None:
    """Look at the samples of a served run, as the model sees them, without taking part in it.

    Nothing is joined, counted, committed or fenced: it may be done while the run trains, before it begins and after
    its end. Samples come by their index in the run's one order, so the samples of a micro-step with a loss spike are
    those between the sample_index of the batch before it and its own. Any index works that the ledger's journal
    reaches, and up to 65,536 samples beyond what is committed.

    Text is the run's tokeniser's, control characters escaped; without a tokeniser, ids are shown.
    """
    from tokenloom_tools.peek import stream

    view = stream.peek(access.servers(url), at, samples)
    if as_json:
        for sample in view.samples:
            print_json(sample.document(view.decode))
    elif text:
        _print_texts(view)
    else:
        _print_samples(view)
    if view.end is not None:
        console(stderr=True).print(f"the data end here: {view.end}")


def _print_samples(view: PeekView) -> None:
    from rich.table import Table
    from tokenloom_server.core.control_characters import escaped

    out = console()
    out.print(f"{view.run}: {view.committed:,} samples are committed")
    table = Table(expand=True)
    is_narrow = out.width < _WIDE
    headings = ("sample", "source") if is_narrow else ("sample", "source", "tokens", "documents")
    for heading in headings:
        table.add_column(
            heading,
            justify="left" if heading == "source" else "right",
            no_wrap=True,
            max_width=_NAME if is_narrow and heading == "source" else None,
        )
    of_rows = any(sample.row is not None for sample in view.samples)
    table.add_column(
        "row" if of_rows else "text" if view.decode else "ids",
        no_wrap=True,
        overflow="ellipsis",
        ratio=1,
    )
    for sample in view.samples:
        begin = escaped(sample.text(view.decode, out.width))
        counts = () if is_narrow else (f"{sample.tokens:,}", f"{sample.documents:,}")
        table.add_row(f"{sample.index:,}", sample.source, *counts, begin)
    out.print(table)


def _print_texts(view: PeekView) -> None:
    out = console()
    for sample in view.samples:
        out.rule(
            f"sample {sample.index:,}: {sample.source}, {sample.tokens:,} tokens, {sample.documents:,} documents",
            align="left",
        )
        out.print(sample.text(view.decode), soft_wrap=True)

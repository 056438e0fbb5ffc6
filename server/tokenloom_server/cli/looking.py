"""``tokenloom peek`` and ``tokenloom trace``: a run's samples, and what they are made of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tokenloom_server.cli.common import RunName, TlsCa, TlsCert, TlsKey, TokenFile, Url, console, fail, print_json
from tokenloom_server.errors import ConfigError, TokenloomError

if TYPE_CHECKING:
    from tokenloom_server.reports.trace import TracedSample, TracedStep
    from tokenloom_server.tools.viewer import View

app = typer.Typer()


@app.command()
def peek(
    url: Annotated[
        str,
        typer.Argument(
            help="What trainers use: grpc://HOST:PORT/RUN, or grpcs:// with TLS.", metavar="URL", show_default=False
        ),
    ],
    at: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The sample index to begin at, such as a trainer's sample_index before a loss spike; where the "
            "ledger stands if not given.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=10_000, help="How many samples.")] = 8,
    text: Annotated[bool, typer.Option("--text", help="Print the whole text of each sample.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the samples as JSON, one a line, with ids, text and digest.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Look at the samples of a served run, as the model sees them, without taking part in it.

    Nothing is joined, counted, committed or fenced: it may be done while the run trains, before it begins and after
    its end. Samples come by their index in the run's one order, so the samples of a step with a loss spike are those
    between the sample_index of the batch before it and its own. Any index works that the ledger's journal reaches,
    and up to 65,536 samples beyond what is committed.

    Text is the run's tokeniser's, control characters as pictures; without a tokeniser, ids are shown.
    """
    from tokenloom_server.tools.viewer import look

    try:
        view = look(
            url,
            at,
            samples,
            os.environ,
            token_file=token_file,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
    except TokenloomError as error:
        fail(error)
    if as_json:
        for seen in view.samples:
            print_json(seen.document(view.decode))
    elif text:
        _print_texts(view)
    else:
        _print_samples(view)
    if view.end is not None:
        console(stderr=True).print(f"the data end here: {view.end}", highlight=False)


def _print_samples(view: View) -> None:
    from rich.table import Table

    from tokenloom_server.tokenizer.text import on_one_line

    out = console()
    out.print(f"{view.run}: {view.committed:,} samples are committed", highlight=False)
    table = Table(expand=True)
    for heading in ("sample", "source", "tokens", "documents"):
        table.add_column(heading, justify="left" if heading == "source" else "right", no_wrap=True)
    of_rows = any(seen.row is not None for seen in view.samples)
    table.add_column("row" if of_rows else "text" if view.decode else "ids", no_wrap=True, overflow="ellipsis", ratio=1)
    for seen in view.samples:
        begin = on_one_line(seen.text(view.decode, out.width))
        table.add_row(f"{seen.index:,}", seen.source, f"{seen.tokens:,}", f"{seen.documents:,}", begin)
    out.print(table)


def _print_texts(view: View) -> None:
    from tokenloom_server.tokenizer.text import as_lines

    out = console()
    for seen in view.samples:
        out.rule(
            f"sample {seen.index:,}: {seen.source}, {seen.tokens:,} tokens, {seen.documents:,} documents",
            align="left",
        )
        out.print(as_lines(seen.text(view.decode)), highlight=False, soft_wrap=True)


@app.command()
def trace(
    url: Url,
    sample: Annotated[
        int | None, typer.Option(min=0, help="A sample index: one sample's documents.", show_default=False)
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="A step of a generation, from 0: what its ranks got in it.", show_default=False),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of the step, one rank; all if not given.")] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            min=1, help="The launch whose line to follow, where a later one rewound it; the present one if not given."
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(help="Of a sample that was evaluated on: its stream, such as validation.", show_default=False),
    ] = None,
    run: RunName = None,
    text: Annotated[bool, typer.Option("--text", help="Print each document's text, too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as JSON; with --text also texts and ids.")
    ] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show which documents a sample was made of, or what each rank got in a step: file, row, and tokens of the row.

    Nothing of this was kept: the server makes the samples again from the nearest state in its ledger and reads their
    rows once more, in turns with the peeks, so that training is not slowed. Tokens of a row are counted with its
    begin- and end-of-text ids.
    """
    from tokenloom_server.tools.remote import Remote

    try:
        if (sample is None) == (step is None):
            raise ConfigError("give one of --sample and --step")
        if rank is not None and step is None:
            raise ConfigError("--rank goes with --step; a sample is one rank's anyway")
        if stream is not None and sample is None:
            raise ConfigError("--stream goes with --sample; a stream that is evaluated on has no steps of its own")
        remote = Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        name = remote.only_run(run)
        found: TracedSample | TracedStep
        if step is not None:
            found = remote.trace_step(name, step, rank=rank, generation=generation, text=text)
        else:
            assert sample is not None
            found = remote.trace_sample(name, sample, generation=generation, text=text, stream=stream)
    except TokenloomError as error:
        fail(error)
    if as_json:
        print_json(found.model_dump())
    else:
        from tokenloom_server.reports.trace_text import print_trace

        print_trace(console(), name, found, text)

"""``tokenloom peek``: a run's samples, as the model sees them, by the documents they are made of, or as files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.options import ReadAccess, Url
from tokenloom_tools.cli.output import console, print_json, say, set_up_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenloom_tools.peek import PeekView
    from tokenloom_tools.remote import Remote
    from tokenloom_tools.reports.documents import TracedMicroStep, TracedSample

#: How many samples are shown, if that is not said.
SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Traced:
    """Whether documents are shown, and of which launch or stream."""

    documents: Annotated[
        bool,
        typer.Option(
            "--documents",
            help="Show which documents each sample was made of, one sample if --samples is not given: file, row, and "
            "tokens of the row.",
        ),
    ] = False
    micro_step: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Show the documents that each rank got in this micro-step, from 0, of a launch.",
        ),
    ] = None
    rank: Annotated[
        int | None, typer.Option(min=0, help="Of the micro-step, one rank; all if not given.")
    ] = None
    generation: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The launch whose line to follow, where a later one rewound it; the present one if not given.",
        ),
    ] = None
    stream: Annotated[
        str | None,
        typer.Option(help="Of a sample that was evaluated on: its stream, such as validation."),
    ] = None

    def wanted(self) -> bool:
        """Whether documents are asked for. Raises ``ConfigError`` for options that do not go together."""
        if self.rank is not None and self.micro_step is None:
            raise ConfigError("--rank goes with --micro-step; a sample is one rank's anyway")
        by_sample = self.documents and self.micro_step is None
        if self.stream is not None and not by_sample:
            raise ConfigError(
                "--stream goes with --documents; a stream that is evaluated on has no micro-steps of its own"
            )
        if self.generation is not None and not by_sample and self.micro_step is None:
            raise ConfigError("--generation goes with --documents or --micro-step")
        return self.documents or self.micro_step is not None

    def traces(
        self, server: Remote, run: str, at: int | None, samples: int, *, text: bool
    ) -> Iterator[TracedSample | TracedMicroStep]:
        """What the server says of the samples, or of the micro-step."""
        if (at is None) == (self.micro_step is None):
            raise ConfigError("documents: give one of --at and --micro-step")
        if self.micro_step is not None:
            yield server.trace_micro_step(
                run, self.micro_step, rank=self.rank, generation=self.generation, text=text
            )
            return
        assert at is not None
        for index in range(at, at + samples):
            yield server.trace_sample(
                run, index, generation=self.generation, text=text, stream=self.stream
            )


#: Lines of fewer characters have no room for counts beside the text, and for so much of a source's name.
_WIDE, _NAME = 100, 20


def peek(
    url: Url,
    at: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The sample index to begin at, such as a trainer's sample_index before a loss spike; where the "
            "ledger stands if not given, and with --out 0.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"How many; {SHOWN} if not given, and with --out up to where the ledger stands.",
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the whole text, of each sample or document.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print them as JSON, one a line, with ids, text and digest."),
    ] = False,
    *,
    traced: _Traced,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the samples as files of this name: OUT.bin, OUT.idx (or OUT.parquet), OUT.json."
        ),
    ] = None,
    form: Annotated[
        Literal["megatron", "parquet"] | None,
        typer.Option(
            "--format",
            help="Of --out: Megatron-LM's .bin and .idx (megatron, if not given), or one Parquet file with page "
            "checksums.",
        ),
    ] = None,
    access: ReadAccess,
) -> None:
    """Look at a served run's samples, as the model sees them, or write them to files.

    Nothing is joined, counted, committed or fenced: it may be done while the run trains, before it begins and after
    its end. Samples come by their index in the run's one order, so the samples of a micro-step with a loss spike are
    those between the sample_index of the batch before it and its own. Any index works that the ledger's journal
    reaches, and up to 65,536 samples beyond what is committed. Text is the run's tokeniser's, control characters
    escaped; without a tokeniser, ids are shown.

    Documents were not kept: the server makes the samples again from the nearest state in its ledger and reads their
    rows once more, in turns with the peeks, so that training is not slowed. Tokens of a row are counted with its
    begin- and end-of-text ids.

    With --out each sample becomes one document: as megatron with a sequence for each document that it has a part of; as
    parquet a row with sample, source, ids and starts. Where labels are the next ids (labels: shifted), a sample has one
    id more, as it travels. OUT.json says of which run and range they are, with the digests before and after it, the
    config's digest and the files' checksums. It is written last: where it is, all is whole. A server that goes away is
    waited for a minute.
    """
    if out is None and form is not None:
        raise ConfigError("--format goes with --out")
    if text and (as_json or out is not None) and not traced.wanted():
        raise ConfigError("--text is for reading: --json and --out have all of it; leave one out")
    if out is not None and as_json:
        raise ConfigError("--out writes files, --json prints: leave one out")
    if samples is not None and traced.micro_step is not None:
        raise ConfigError("--samples goes with --at; a micro-step has the samples that it has")
    if traced.wanted():
        if out is not None:
            raise ConfigError("--out writes samples, not their documents: leave out one of them")
        from tokenloom_tools.reports.terminal import print_trace

        server = access.connect(url)
        run = server.only_run()
        for trace in traced.traces(server, run, at, samples or 1, text=text):
            if as_json:
                print_json(trace.model_dump())
            else:
                print_trace(console(), run, trace, text)
        return
    if out is not None:
        _export(access, url, at or 0, samples, out, form or "megatron")
        return
    from tokenloom_tools import peek as samples_of

    view = samples_of.peek(access.servers(url), at, samples or SHOWN)
    if as_json:
        for sample in view.samples:
            print_json(sample.document(view.decode))
    elif text:
        _print_texts(view)
    else:
        _print_samples(view)
    if view.end is not None:
        console(stderr=True).print(f"the data end here: {view.end}")


def _export(
    access: ReadAccess,
    url: str,
    begin: int,
    count: int | None,
    out: Path,
    form: Literal["megatron", "parquet"],
) -> None:
    """Writes a range as files that other tools read."""
    from tokenloom_tools.cli.output import Progress
    from tokenloom_tools.export import export
    from tokenloom_tools.peek import SampleRange

    set_up_logging("warning")
    end = None if count is None else begin + count
    samples = SampleRange(access.servers(url), begin, end, clock=time.monotonic)
    try:
        with Progress(count, "samples", bytes_are_total=False) as progress:
            done = export(samples, out, form, progress.advance)
    except KeyboardInterrupt:
        console(stderr=True).print("stopped; nothing was written")
        raise typer.Exit(130) from None
    files = ", ".join(str(path) for path in done.files)
    say(f"samples {done.begin:,} to {done.end - 1:,}, {done.tokens:,} tokens: {files}")


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

"""A trace for people: what `tokenloom peek --documents` prints."""

from __future__ import annotations

from rich.console import Console

from tokenloom_tools.reports.tables import table
from tokenloom_tools.reports.trace import TracedDocument, TracedMicroStep, TracedSample


def print_trace(out: Console, run: str, trace: TracedSample | TracedMicroStep, text: bool) -> None:
    """One sample and its documents; of a micro-step each rank's samples. With ``text`` each document's, too."""
    if isinstance(trace, TracedSample):
        _print_sample(out, f"{run}: ", trace, text)
        return
    named = f"{trace.world_size} ranks × {trace.batch_size}"
    out.print(
        f"{run}: micro-step {trace.micro_step:,} of generation {trace.generation} ({named}): samples {trace.begin:,} "
        f"to {trace.end - 1:,}, slices rotated by {trace.rotation}"
    )
    if text:
        for rank in trace.ranks:
            out.rule(f"rank {rank.rank}", align="left")
            for sample in rank.samples:
                _print_sample(out, "", sample, text)
        return
    rows: list[tuple[str, ...]] = []
    for rank in trace.ranks:
        for sample in rank.samples:
            start = (f"{rank.rank}", f"{sample.sample:,}", sample.source)
            rows += ((*start, *_row(document)) for document in sample.documents)
        if rank.padding:
            rows.append((f"{rank.rank}", "", f"{rank.padding} of padding"))
    out.print(table(("rank", "sample", "source", *_DOCUMENT), rows, left=("source", "file")))


def _print_sample(out: Console, begin: str, sample: TracedSample, text: bool) -> None:
    where = (
        "of the stream that was asked for" if sample.status == "evaluated" else "in another ledger"
    )
    if sample.micro_step is not None:
        place = f"place {sample.place} of rank {sample.rank}"
        where = f"generation {sample.generation}, micro-step {sample.micro_step:,}: {place}"
    out.print(f"{begin}sample {sample.sample:,} ({sample.status}) in {where}")
    out.print(
        f"source {sample.source} ({sample.spec}), its sample {sample.source_sample:,}; hash {sample.hash}, digest "
        f"after it {sample.digest}",
        soft_wrap=True,
    )
    if not text:
        out.print(table(_DOCUMENT, map(_row, sample.documents), left=("file",)))
        return
    for document in sample.documents:
        position, path, row, epoch, tokens, whole = _row(document)
        out.rule(
            f"at {position}: {path}, row {row}, epoch {epoch}, tokens {tokens} of {whole}",
            align="left",
        )
        shown = document.text if document.text is not None else "the run has no tokeniser"
        out.print(shown, soft_wrap=True)


#: The headings of a document's columns.
_DOCUMENT = ("at", "file", "row", "epoch", "tokens", "of")


def _row(document: TracedDocument) -> tuple[str, ...]:
    return (
        f"{document.position:,}",
        document.shard,
        f"{document.row:,}",
        f"{document.epoch}",
        f"{document.begin:,} to {document.end - 1:,}",
        f"{document.row_tokens:,}" + (f" ({document.fim})" if document.fim is not None else ""),
    )

"""A run's report in Markdown: the part of a model card that is about data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from tokenloom_server.reports.receipt import GenerationReport, Range, RevisionInfo, RunReport, SourceReport


def markdown(report: RunReport) -> str:
    """The whole text, with a newline at its end."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    yield f"## Training data of {_code(report.run)}"
    yield ""
    over = f", where the data end: {report.ended}" if report.ended is not None else ""
    parent = report.parent_run
    samples = report.sample_index - sum(skipped.end - skipped.first for skipped in report.skipped)
    samples -= parent["left_samples"] if parent is not None else 0
    length = f"{report.sequence_length:,}"
    one = report.consumed_tokens == samples * report.sequence_length
    of_length = f"of {length}" if one else f"(of {length} tokens by now; phases before had others)"
    yield (
        f"{report.consumed_tokens:,} tokens in {samples:,} samples {of_length}{over}. "
        f"{_unique(report.unique_tokens, report.unique_is_exact)} of them unique: tokens of rows that were read, "
        "each row counted once."
    )
    yield ""
    if parent is not None:
        yield (
            f"The first {parent['sample_index']:,} samples ({parent['total_tokens']:,} tokens) are those of "
            f"{_code(parent['run'])}, which this run was forked from. {parent['left_samples']:,} of them "
            f"({parent['left_tokens']:,} tokens) are of sources that this run does not have, and only in the other "
            "report."
        )
        yield ""
    yield from _table(
        ("source", "share", "tokens", "unique tokens", "epochs", "rows", "files", "MB", "SHA-256 of the list of files"),
        map(_source, report.sources),
    )
    yield ""
    for source in report.sources:
        commits = f", read at {', '.join(map(_code, source.commits))}" if source.commits else ""
        yield f"- {_code(source.alias)}: {_code(source.spec)}{commits}"
    yield ""
    yield "### How they were read"
    yield ""
    tokenizer = report.tokenizer
    yield from _table(
        ("", ""),
        (
            ("tokeniser", _tokeniser(report)),
            ("tokeniser's files, SHA-256", _code(tokenizer.digest or "none")),
            ("packing, labels", f"{report.packing}, {report.labels}"),
            ("seed", str(report.seed)),
            ("mixture file at the beginning, SHA-256", _code(report.config_digest)),
            ("manifest of all files, SHA-256", _code(report.manifest_digest)),
            ("order version", str(report.order_version)),
            ("digest of all samples", _code(report.digest)),
            ("skipped samples, given to no trainer", ", ".join(map(_range, report.skipped)) or "none"),
            *(
                (("forked from", f"run uid {_code(parent['uid'])}, generation {parent['generation']}"),)
                if parent
                else ()
            ),
            ("software", ", ".join(f"{name} {version}" for name, version in report.software.items())),
            ("run", f"uid {_code(report.run_uid)}, stream {_code(report.stream)}"),
        ),
    )
    yield ""
    if report.revisions:
        yield "### Changes of the mixture"
        yield ""
        yield from _table(("from sample", "tokens before it", "by", "reason", "what"), map(_revision, report.revisions))
        yield ""
    if report.exclusions:
        yield "### Rows left out"
        yield ""
        yield from _table(
            ("file", "rows", "SHA-256"),
            ((_code(file.path), f"{file.rows:,}", _code(file.sha256)) for file in report.exclusions),
        )
        yield ""
        left_out = [source for source in report.sources if source.excluded_rows]
        yield from (f"- {_code(source.alias)}: {source.excluded_rows:,} rows of each epoch" for source in left_out)
        yield ""
    yield "### Launches"
    yield ""
    yield from _table(
        ("launch", "opened (UTC)", "ranks × batch", "from", "goes on from", "samples of the run"),
        map(_generation, report.generations),
    )
    yield ""
    yield (
        f"As of {_time(report.made_at)} UTC. Two runs with the same digest at the same number of samples had the same "
        "data, on any topology (`tokenloom verify`)."
    )


def _source(source: SourceReport) -> Sequence[str]:
    return (
        _code(source.alias),
        f"{source.share:.2%}",
        f"{source.tokens:,}",
        _unique(source.unique_tokens, source.unique_is_exact),
        f"{source.epochs:.2f}",
        f"{source.rows:,}",
        f"{source.files:,}",
        f"{source.bytes / 1e6:,.1f}",
        _code(source.files_digest),
    )


def _revision(found: RevisionInfo) -> Sequence[str]:
    return (
        f"{found.sample_index:,}",
        f"{found.total_tokens:,}",
        found.author,
        found.reason,
        "; ".join(found.changes),
    )


def _generation(found: GenerationReport) -> Sequence[str]:
    return (
        str(found.generation),
        _time(found.opened_at),
        f"{found.world_size:,} × {found.batch_size:,}"
        + "".join(f", {later.batch_size:,} from {later.sample_index:,} on" for later in found.batch_sizes),
        f"{found.start_index:,}",
        f"launch {found.parent}" if found.parent else "the beginning" if not found.start_index else "elsewhere",
        "none: a later launch began at or before it" if found.kept is None else _range(found.kept),
    )


def _range(found: Range) -> str:
    if found.end == found.first:
        return f"none yet, from {found.first:,}"
    return f"{found.first:,} to {found.end - 1:,}"


def _unique(tokens: int, exact: bool) -> str:
    return f"{tokens:,}" if exact else f"about {tokens:,} (estimated)"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (headings, ["---"] * len(headings), *rows):
        # Names come from mixture files: a bar in one would begin another cell.
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"


def _tokeniser(report: RunReport) -> str:
    named = f"{report.tokenizer.engine} {report.tokenizer.version}".strip()
    # Rows that travel as they are have no ids.
    return f"{named}, vocabulary {report.vocab_size:,}" if report.vocab_size else named


def _code(text: str) -> str:
    """Text as it is, also where it has backticks of its own: the fence is longer than all of them."""
    fence = "`" * (text.count("`") + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"

"""A run's report in Markdown: the part of a model card that is about data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from tokenloom_server.reports.stats import RevisionInfo

from tokenloom_tools.reports.documents import GenerationReport, Range, RunReport, SourceReport


def markdown(report: RunReport) -> str:
    """The whole text, with a newline at its end."""
    sections = (_summary, _sources, _reading, _changes, _left_out, _launches)
    return "\n\n".join(block for section in sections for block in section(report)) + "\n"


def _summary(report: RunReport) -> Iterator[str]:
    yield f"## Training data of {_code(report.run)}"
    over = f", where the data end: {report.ended}" if report.ended is not None else ""
    parent = report.parent_run
    # Below 0 where the other run passed over samples.
    samples = report.sample_index - (max(0, parent["left_samples"]) if parent is not None else 0)
    length = f"{report.sequence_length:,}"
    one = report.consumed_tokens == samples * report.sequence_length
    of_length = f"of {length}" if one else f"(of {length} tokens by now; phases before had others)"
    yield (
        f"{report.consumed_tokens:,} tokens in {samples:,} samples {of_length}{over}. "
        f"{_unique(report.unique_tokens, report.unique_is_exact)} of them unique: tokens of rows that were read, "
        "each row counted once."
    )
    if parent is not None:
        yield (
            f"The first {parent['sample_index']:,} samples ({parent['total_tokens']:,} tokens) are those of "
            f"{_code(parent['run'])}, which this run was forked from. {parent['left_samples']:,} of them "
            f"({parent['left_tokens']:,} tokens) are of sources that this run does not have, and only in the other "
            "report."
        )


def _sources(report: RunReport) -> Iterator[str]:
    yield _table(
        (
            "source",
            "share",
            "tokens",
            "unique tokens",
            "epochs",
            "rows",
            "files",
            "MB",
            "SHA-256 of the list of files",
        ),
        map(_source, report.sources),
    )
    lines = []
    for source in report.sources:
        commits = f", read at {', '.join(map(_code, source.commits))}" if source.commits else ""
        lines.append(f"- {_code(source.alias)}: {_code(source.spec)}{commits}")
    yield "\n".join(lines)


def _reading(report: RunReport) -> Iterator[str]:
    yield "### How they were read"
    rows = [
        ("tokeniser", _tokeniser(report)),
        ("tokeniser's files, SHA-256", _code(report.tokenizer.digest or "none")),
        ("packing, labels", f"{report.packing}, {report.labels}"),
        ("seed", str(report.seed)),
        ("mixture file at the beginning, SHA-256", _code(report.config_digest)),
        ("manifest of all files, SHA-256", _code(report.manifest_digest)),
        ("order version", str(report.order_version)),
        ("digest of all samples", _code(report.digest)),
        (
            "skipped tokens, given to no trainer",
            f"{sum(source.skipped_tokens for source in report.sources):,}",
        ),
    ]
    if parent := report.parent_run:
        rows.append(
            ("forked from", f"run uid {_code(parent['uid'])}, generation {parent['generation']}")
        )
    rows.append(
        ("software", ", ".join(f"{name} {version}" for name, version in report.software.items()))
    )
    rows.append(("run", f"uid {_code(report.run_uid)}, stream {_code(report.stream)}"))
    yield _table(("", ""), rows)


def _changes(report: RunReport) -> Iterator[str]:
    if report.revisions:
        yield "### Changes of the mixture"
        yield _table(
            ("from sample", "tokens before it", "by", "reason", "what"),
            map(_revision, report.revisions),
        )


def _left_out(report: RunReport) -> Iterator[str]:
    if not report.exclusions:
        return
    yield "### Rows left out"
    files = ((_code(file.path), f"{file.rows:,}", _code(file.sha256)) for file in report.exclusions)
    yield _table(("file", "rows", "SHA-256"), files)
    sources = [source for source in report.sources if source.excluded_rows]
    if sources:
        yield "\n".join(
            f"- {_code(source.alias)}: {source.excluded_rows:,} rows of each epoch"
            for source in sources
        )


def _launches(report: RunReport) -> Iterator[str]:
    yield "### Launches"
    headings = (
        "launch",
        "opened (UTC)",
        "ranks × batch",
        "from",
        "goes on from",
        "samples of the run",
    )
    yield _table(headings, map(_generation, report.generations))
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


def _revision(revision: RevisionInfo) -> Sequence[str]:
    return (
        f"{revision.sample_index:,}",
        f"{revision.total_tokens:,}",
        revision.author,
        revision.reason,
        "; ".join(revision.changes),
    )


def _generation(launch: GenerationReport) -> Sequence[str]:
    return (
        str(launch.generation),
        _time(launch.opened_at),
        f"{launch.world_size:,} × {launch.batch_size:,}"
        + "".join(
            f", {later.batch_size:,} from {later.sample_index:,} on" for later in launch.batch_sizes
        ),
        f"{launch.start_index:,}",
        f"launch {launch.parent}"
        if launch.parent
        else "the beginning"
        if not launch.start_index
        else "elsewhere",
        "none: a later launch began at or before it"
        if launch.kept is None
        else _range(launch.kept),
    )


def _range(samples: Range) -> str:
    if samples.end == samples.first:
        return f"none yet, from {samples.first:,}"
    return f"{samples.first:,} to {samples.end - 1:,}"


def _unique(tokens: int, exact: bool) -> str:
    return f"{tokens:,}" if exact else f"about {tokens:,} (estimated)"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # Names come from mixture files: a bar in one would begin another cell.
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in (headings, ["---"] * len(headings), *rows)
    )


def _tokeniser(report: RunReport) -> str:
    named = f"{report.tokenizer.engine} {report.tokenizer.version}".strip()
    # Rows that travel as they are have no ids.
    return f"{named}, vocabulary {report.vocab_size:,}" if report.vocab_size else named


def _code(text: str) -> str:
    """Text as it is, also where it has backticks of its own: the fence is longer than all of them."""
    fence = "`" * (text.count("`") + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"

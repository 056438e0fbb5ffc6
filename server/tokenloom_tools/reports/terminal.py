"""What people read of a run, in a terminal: its stats, its mixture with phases and revisions, its plan, and traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.tree import Tree
from tokenloom_server.core.numbers import short
from tokenloom_server.ledger.records import date_of
from tokenloom_server.order.readers_stats import ReadersStats, ReaderWork
from tokenloom_server.planning.plan import PlannedSource, RunPlan
from tokenloom_server.reports.stats import (
    SLOW_DATA_SHARE,
    MixtureInfo,
    RevisionInfo,
    RunStats,
    SourceStats,
    skips_text,
)

from tokenloom_tools.reports.documents import TracedDocument, TracedMicroStep, TracedSample


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = ("source",),
    title: str | None = None,
) -> Table:
    """Numbers stand at the right of their column; the columns ``left`` hold text. Long cells are folded, not cut."""
    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


#: The columns of the two tables that take the place of one which is too wide.
_SHARES = ("target", "expected", "actual", "recent", "loss")
_COUNTERS = ("samples", "rows", "tokens", "epoch", "left")
#: Lines that are long enough for one table, characters.
_WIDE = 140
#: More sources than these are shown in groups; and more rows than these as one.
MANY = 24


def print_stats(out: Console, stats: RunStats, *, every_source: bool = False) -> None:
    """Where the run stands, a table of its sources, its ranks, and what it waits for. Many sources are shown in groups,
    but for ``every_source``."""
    out.print(
        f"{stats.run}: sample {stats.sample_index:,}, {stats.total_tokens:,} tokens committed, "
        f"{stats.tokens_per_s:,.0f} tokens/s; generation {stats.generation}, "
        f"{stats.world_size} ranks × {stats.batch_size}; ledger {stats.ledger.backend}"
    )
    if stats.revision or stats.next_revision:
        coming = stats.next_revision
        later = (
            f"; revision {coming.number} from sample {coming.sample_index:,} on" if coming else ""
        )
        current = (
            f"revision {stats.revision}"
            if stats.revision
            else "the mixture that the run began with"
        )
        out.print(f"in force: {current}{later} (tokenloom mixture show)")
    shown = stats if every_source else stats.model_copy(update={"sources": _few(stats.sources)})
    for part in _tables(out, shown):
        out.print(part)
    if len(shown.sources) < len(stats.sources):
        out.print(f"{len(stats.sources):,} sources, in groups (--all shows each)")
    if stats.window_samples:
        out.print(f"recent: of {stats.window_samples:,} samples")
    if stats.count == "real":
        out.print("shares are of real tokens, without padding")
    for line in _losses(stats), _rows_without_tokens(stats), _skipped(stats), _pinned(stats):
        if line:
            out.print(line)
    for rank in stats.ranks:
        heard = (
            "never heard" if rank.last_heard_s is None else f"heard {rank.last_heard_s:.1f} s ago"
        )
        waited = f", waited {rank.waited_s:,.1f} s for data" if rank.waited_s else ""
        client = f", client {rank.release}" if rank.release else ""
        position = f"at sample {rank.position:,} (lag {rank.lag:,})"
        out.print(f"rank {rank.rank}: {rank.state}, {position}, {heard}{waited}{client}")
    for line in _readers(stats.readers) if stats.readers is not None else ():
        out.print(line)
    if stats.opening:
        out.print("a launch is being opened")
    if stats.going_forward:
        out.print(f"going forward {stats.going_forward}")
    for note in (_pace(stats), stats.ended, stats.error, stats.warning):
        if note:
            out.print(note)


def _tables(out: Console, stats: RunStats) -> Iterator[Table]:
    """The table of the sources; where lines are too short for it, one of their shares and one of their counters, in
    short numbers."""
    if out.width >= _WIDE:
        yield sources_table(stats)
    else:
        yield sources_table(stats, without=_COUNTERS)
        yield sources_table(stats, without=_SHARES, count=short)


def line_of(stats: RunStats) -> str:
    """A run in a line."""
    waits = f"waits for {stats.waiting_for}" if stats.waiting_for else "trains"
    state = stats.error or stats.ended or (stats.straggler and stats.straggler.text) or waits
    return f"{stats.run}: sample {stats.sample_index:,}, {stats.total_tokens:,} tokens; {state}"


def _few(sources: Sequence[SourceStats]) -> Sequence[SourceStats]:
    """The sources; of many their groups, by the tokens that they had; and of many groups the smaller ones as one."""
    if len(sources) <= MANY:
        return sources
    groups: dict[str, list[SourceStats]] = {}
    for source in sources:
        groups.setdefault(source.group, []).append(source)
    by_tokens = sorted(groups.values(), key=lambda of: -sum(source.tokens for source in of))
    rest = [source for of in by_tokens[MANY:] for source in of]
    merged = [
        _merged(f"{of[0].group} ({len(of):,})" if of[1:] else of[0].alias, of)
        for of in by_tokens[:MANY]
    ]
    return [*merged, _merged(f"{len(rest):,} others", rest)] if rest else merged


def _merged(alias: str, sources: Sequence[SourceStats]) -> SourceStats:
    """Several sources as one."""

    def total(name: str) -> Any:
        values = [getattr(source, name) for source in sources]
        return None if None in values else sum(values)

    names = ("target_share", "expected_share", "actual_share", "window_share")
    counters = ("samples", "rows", "tokens", "remaining_samples")
    rows = total("rows") or 1
    return sources[0].model_copy(
        update={
            "alias": alias,
            **{name: total(name) for name in (*names, *counters)},
            "epoch": sum(source.epoch * source.rows for source in sources) / rows,
            "exhausted": all(source.exhausted for source in sources),
            "loss": sources[0].loss if len(sources) == 1 else None,
        }
    )


def sources_table(
    stats: RunStats,
    *,
    title: str | None = None,
    without: Collection[str] = (),
    count: Callable[[int], str] = "{:,}".format,
) -> Table:
    """The shares and counters of each source; ``without`` some of the columns. ``count`` writes counters."""
    cells: dict[str, Callable[[SourceStats], str]] = {
        "source": lambda source: source.alias,
        "target": lambda source: f"{source.target_share:.2%}",
        "expected": lambda source: f"{source.expected_share:.2%}",
        "actual": lambda source: f"{source.actual_share:.2%}",
        "recent": lambda source: (
            "–" if source.window_share is None else f"{source.window_share:.2%}"
        ),
        "loss": lambda source: "–" if source.loss is None else f"{source.loss:.4f}",
        "samples": lambda source: count(source.samples),
        "rows": lambda source: count(source.rows),
        "tokens": lambda source: count(source.tokens),
        "epoch": lambda source: f"{source.epoch:.2f}",
        "left": lambda source: _left(source, count),
    }
    hidden = {*without, *(() if stats.reported is not None else ("loss",))}
    headings = [heading for heading in cells if heading not in hidden]
    rows = [[cells[heading](source) for heading in headings] for source in stats.sources]
    return table(headings, rows, title=title)


def _pace(stats: RunStats) -> str:
    """Whether training or the data sets the pace, and what is waited for."""
    share, parts = stats.data_wait_share, []
    if stats.straggler is not None:
        parts.append(stats.straggler.text)
    elif share is not None and stats.ended is None and stats.error is None:
        slow = "the data sets the pace" if share >= SLOW_DATA_SHARE else "training sets the pace"
        parts.append(f"{slow}: ranks waited for data {share:.0%} of the last half a minute")
    if stats.waiting_for:
        ready = "samples are ready; " if stats.waiting_reason == "ranks" and stats.ranks else ""
        parts.append(f"{ready}waiting for {stats.waiting_for}")
    return "; ".join(parts)


def _left(source: SourceStats, count: Callable[[int], str]) -> str:
    if source.exhausted:
        return "exhausted"
    return "?" if source.remaining_samples is None else count(source.remaining_samples)


def _losses(stats: RunStats) -> str:
    report = stats.reported
    if report is None:
        return ""
    loss = "" if report.loss is None else f", loss {report.loss:.4f}"
    rate = "" if report.learning_rate is None else f", learning rate {report.learning_rate:.2e}"
    return f"reported {report.age_s:.1f} s ago: step {report.step:,}, sample {report.sample_index:,}{loss}{rate}"


def _rows_without_tokens(stats: RunStats) -> str:
    sources = "; ".join(
        f"{source.alias} {source.bad_rows:,} bad, {source.filtered_rows:,} filtered"
        for source in stats.sources
        if source.bad_rows or source.filtered_rows
    )
    return f"rows that gave no tokens: {sources}" if sources else ""


def _readers(readers: ReadersStats) -> Iterator[str]:
    for source in readers.sources:
        rows = f"{source.rows_ahead:,} rows ahead, asked again {source.asked_again:,} times"
        yield f"readers of {source.alias}: {_work(source)}, {rows}"
    for node in readers.nodes:
        yield f"readers on {node.name}: {node.cpus:g} CPUs, {_work(node)}"


def _work(work: ReaderWork) -> str:
    return f"{work.answers:,} answers, {work.tokens:,} tokens, {work.ns_per_token:.1f} ns of CPU per token"


def _skipped(stats: RunStats) -> str:
    sources = ", ".join(
        f"{source.alias} {source.skipped_samples:,} samples, {source.skipped_rows:,} rows, "
        f"{source.skipped_tokens:,} tokens"
        for source in stats.sources
        if source.skipped_samples
    )
    passed = f"the order passes over {skips_text(stats.skips)}; " if stats.skips else ""
    return passed + (f"skipped by restores, and not counted above: {sources}" if sources else "")


def _pinned(stats: RunStats) -> str:
    pin = stats.pin
    if pin is None:
        return ""
    skips = "" if pin.skips is None else f"; from then on {skips_text(pin.skips)} are passed over"
    return f"pinned for the next launch: sample {pin.sample_index:,}{skips}"


#: Of a node or source, what is not printed as ``name value``.
_NOT_OPTIONS = ("alias", "source", "policy", "children")


def print_mixture(out: Console, info: MixtureInfo) -> None:
    """The whole document."""
    out.print(
        f"{info.run}: in force at sample {info.sample_index:,}, sequence length {info.sequence_length:,}"
    )
    out.print(_tree(info.mixture, "mixture", frozenset(info.paused)))
    if info.dropped:
        out.print(f"dropped: {', '.join(info.dropped)}")
    if info.phases:
        out.print(_phases(info))
    if info.revisions:
        out.print(_revisions(info))
    out.print(f"a new revision can hold from sample {info.first_revisable:,} on")


def print_revision(out: Console, run: str, revision: RevisionInfo, verb: str) -> None:
    """One revision and what it changes; ``verb``: that it holds, would hold, or was taken back."""
    when = (
        ""
        if revision.eta_s is None or revision.in_force
        else f", in {revision.eta_s:,.0f} s at the present rate"
    )
    out.print(
        f"{run}: revision {revision.number} {verb} from sample {revision.sample_index:,} on "
        f"({revision.total_tokens:,} tokens{when})"
    )
    for line in revision.changes:
        out.print(f"  {line}", soft_wrap=True)


def mixture_yaml(info: MixtureInfo) -> str:
    """The mixture in force as the ``mixture:`` section of a mixture file."""
    text: str = yaml.safe_dump(
        {"mixture": _in_yaml(info.mixture)}, sort_keys=False, allow_unicode=True
    )
    paused = f"# paused, which a file cannot say: {', '.join(info.paused)}\n" if info.paused else ""
    return paused + text


def _in_yaml(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {key: _in_yaml(each) for key, each in value.items()}
        # What a node is comes first, its children last.
        return {
            key: fields[key]
            for key in sorted(fields, key=lambda key: (key == "children", key != "policy"))
        }
    if isinstance(value, list):
        return [_in_yaml(each) for each in value]
    return math.inf if value == "inf" else value


def _tree(node: dict[str, Any], place: str, paused: Collection[str]) -> Tree:
    tree = Tree(_line(node, place, paused))
    for i, child in enumerate(node["children"]):
        path = f"{place}.children.{i}"
        tree.add(_tree(child, path, paused) if "children" in child else _line(child, path, paused))
    return tree


def _line(child: dict[str, Any], place: str, paused: Collection[str]) -> str:
    """By the name that changes know it by."""
    name = child.get("alias") or child.get("source") or place
    parts = [
        f"{option} {_text(value)}" for option, value in child.items() if option not in _NOT_OPTIONS
    ]
    if "policy" in child:
        parts.insert(0, child["policy"])
    if child.get("alias") and "source" in child:
        parts.append(child["source"])
    if name in paused:
        parts.append("paused")
    return f"{name}: {', '.join(parts)}" if parts else str(name)


def _text(value: Any) -> str:
    if isinstance(value, list):  # comparisons of a filter, or points of a weight
        return " ".join(
            f'"{each}"' if isinstance(each, str) else f"{each[0]:,}:{each[1]:g}" for each in value
        )
    text = (
        f"{value:g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
    return text.replace("\n", "\\n")  # of a template


def _phases(info: MixtureInfo) -> Table:
    rows = (
        (
            str(phase.number),
            f"{phase.sample_index:,}",
            f"{phase.total_tokens:,}",
            f"{phase.sequence_length:,}",
        )
        for phase in info.phases
    )
    return table(("phase", "from sample", "tokens", "sequence length"), rows, title="phases")


def _revisions(info: MixtureInfo) -> Table:
    rows = (
        (
            str(revision.number),
            f"{revision.sample_index:,}",
            f"{revision.total_tokens:,}",
            "yes" if revision.in_force else "not yet",
            f"{revision.author}, {date_of(revision.made_at)}"
            if revision.author
            else date_of(revision.made_at),
            revision.reason,
            "\n".join(revision.changes),
        )
        for revision in info.revisions
    )
    words = ("in force", "author", "reason", "changes")
    return table(("number", "from sample", "tokens", *words), rows, left=words, title="revisions")


#: Columns of the table of shares over time.
SHOWN_SEGMENTS = 6
#: Endings that are named one by one.
SHOWN_ENDINGS = 12


def report(plan: RunPlan) -> Iterator[Table | str]:
    """What is printed, one below the other."""
    yield _sources(plan)
    end = f"{plan.until_tokens:,} tokens (sample {plan.until_sample_index:,})"
    yield f"ends at {end}: {plan.reason}" if plan.ends else f"planned up to {end}: {plan.reason}"
    nodes = {source.alias for source in plan.sources}
    others = [ending for ending in plan.endings if ending.name not in nodes]
    for ending in others[:SHOWN_ENDINGS]:
        yield f"at {short(ending.tokens)} tokens, {ending.name} {ending.why}"
    if len(others) > SHOWN_ENDINGS:
        yield f"and {len(others) - SHOWN_ENDINGS} more nodes end; --json has all"
    if plan.segments:
        yield _shares(plan)


def _sources(plan: RunPlan) -> Table:
    begin = "its beginning" if not plan.from_tokens else f"sample {plan.from_sample_index:,}"
    rows = (
        (
            source.alias,
            "—" if source.rows is None else f"{source.rows:,}",
            "—" if source.tokens_per_epoch is None else short(source.tokens_per_epoch),
            _epochs(source),
            short(source.tokens),
            f"{source.share:.2%}",
            _runs_out(source),
        )
        for source in plan.sources
    )
    headings = ("source", "rows", "tokens per epoch", "epochs", "tokens", "share", "runs out at")
    title = f"run {plan.run}: sequence length {plan.sequence_length:,}, planned from {begin}"
    return table(headings, rows, title=title)


def _runs_out(source: PlannedSource) -> str:
    if source.exhausted_at_tokens is not None:
        return short(source.exhausted_at_tokens)
    return "is out" if source.exhausted else "—"


def _epochs(source: PlannedSource) -> str:
    if source.epochs_read is None:
        return "dropped"
    allowed = "∞" if source.epochs is None else f"{source.epochs:g}"
    return f"{source.epochs_read:,.2f} of {allowed}"


def _shares(plan: RunPlan) -> Table:
    """A row for each source, a column for each of a few segments."""
    import numpy as np
    from tokenloom_server.planning.segments import PlanSegment, merged

    all_of_them = [
        PlanSegment(p.from_tokens, p.until_tokens, np.array(p.shares)) for p in plan.segments
    ]
    few = merged(all_of_them, SHOWN_SEGMENTS)
    rows = (
        (source.alias, *(_share(float(segment.shares[source.id])) for segment in few))
        for source in plan.sources
    )
    spans = (f"{short(segment.begin)} – {short(segment.end)}" for segment in few)
    real = "of real tokens " if plan.count == "real" else ""
    return table(("source", *spans), rows, title=f"shares {real}over the run's tokens")


def _share(share: float) -> str:
    return f"{share:.2%}" if share else "—"


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

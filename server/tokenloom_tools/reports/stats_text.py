"""A run's stats for people: what ``tokenloom stats`` prints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenloom_server.core.amounts import short
from tokenloom_server.order.readers_stats import ReadersStats, ReaderWork
from tokenloom_server.reports.stats import SLOW_DATA_SHARE, RunStats, SourceStats, skips_text

from tokenloom_tools.reports.tables import table

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

"""The plan of a run: from a state, and how much its sources have, to what becomes of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import ChildState, Cursor, SourceState, State
from tokenloom_server.errors import ConfigError
from tokenloom_server.order.record import Order
from tokenloom_server.order.revision import carry
from tokenloom_server.order.size_estimates import SizeEstimate
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.flow import Flowed, flow
from tokenloom_server.planning.plan import PlannedEnding, PlannedSegment, PlannedSource, RunPlan
from tokenloom_server.planning.segments import MAX_SEGMENTS, PlanSegment, merged
from tokenloom_server.planning.tree import Leaf, grow

#: Measures a source of an order, by id.
Measure = Callable[[Order, int], SizeEstimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What decides the run from a sample index on: a mixture, and how much its sources have."""

    config: RunConfig
    #: By source id; None for one that was dropped.
    size_estimates: Sequence[SizeEstimate | None]
    begin: int = 0
    #: The run's total tokens there.
    tokens: int = 0
    #: Sources that have more files than before.
    grown: tuple[int, ...] = ()


def parts_of(timeline: Timeline, measure: Measure, state: State) -> list[Part]:
    """The parts of a run that a plan from a state on goes through. Raises what ``measure`` raises."""
    begins = [segment.begin for segment in timeline.segments]
    first = max(i for i, begin in enumerate(begins) if begin <= state.sample_index)
    return [
        Part(
            config=segment.order.config,
            size_estimates=list(_size_estimates(segment.order, measure)),
            begin=segment.begin,
            tokens=segment.tokens,
            grown=segment.grown,
        )
        for segment in timeline.segments[first:]
    ]


def _size_estimates(order: Order, measure: Measure) -> Iterator[SizeEstimate | None]:
    for source in order.config.sources:
        if source.presence == "dropped":
            yield None
            continue
        extent = measure(order, source.id)
        # Rows that are left out are read as rows without tokens.
        kept = max(0, extent.rows - order.excluded.count(source.source))
        per_row = extent.tokens_per_1000_rows * kept // extent.rows if extent.rows else 0
        yield SizeEstimate(extent.rows, per_row)


def forecast(parts: Sequence[Part], state: State, until: int | None = None) -> RunPlan:
    """What the run will be from a state on, up to ``until`` total tokens or, for None, to its end.

    The state lies in the first of the ``parts``. Takes no longer for more tokens. Raises ``ConfigError`` for an
    ``until`` that is not beyond the state, and for None where no source ever runs out.
    """
    if until is not None and until <= state.total_tokens:
        raise ConfigError(
            f"tokens: {until} tokens are asked for, but the run has {state.total_tokens} already; the number counts "
            "from the run's beginning: give a larger one"
        )
    way = _Way(parts[0], state)
    for part in parts[1:]:
        way.flow(part.tokens if until is None else min(part.tokens, until))
        if way.root.over or way.flowed.reached < part.tokens:
            break
        way.cross(part)
    else:
        way.flow(until)
    if way.flowed.endless and not way.flowed.segments:
        raise ConfigError(
            "tokens: nothing that the mixture reads ever runs out, so a plan has no end of its own; say how far it "
            "goes, such as 10B"
        )
    return way.plan(state)


class _Begin(NamedTuple):
    sample_index: int
    tokens: int
    sequence_length: int


class _Way:
    """A run on its way through its parts."""

    def __init__(self, part: Part, state: State) -> None:
        self.flowed = Flowed(reached=float(state.total_tokens))
        self._begins: list[_Begin] = []
        self._enter(part, state)

    def flow(self, until: int | None) -> None:
        flow(
            self.root,
            self._leaves,
            self.flowed,
            math.inf if until is None else float(until),
            self._part.config.sequence_length,
        )

    def cross(self, part: Part) -> None:
        """Goes on in the next part, where this one ends."""
        state = replace(self._state(), sample_index=part.begin, total_tokens=part.tokens)
        self._enter(part, carry(state, self._part.config, part.config, part.grown))

    def plan(self, start: State) -> RunPlan:
        flowed, config, state = self.flowed, self._part.config, self._state()
        end = round(flowed.reached)
        # What was out and came back with more files is not out.
        last = {ending.source: round(ending.at) for ending in flowed.endings if ending.source is not None}
        segments = [replace(each, shares=_padded(each, len(self._leaves))) for each in flowed.segments]
        return RunPlan(
            run=config.run,
            sequence_length=config.sequence_length,
            labels=config.labels,
            from_sample_index=start.sample_index,
            from_tokens=start.total_tokens,
            until_sample_index=self._index_at(end),
            until_tokens=end,
            ends=self.root.over,
            reason=self._reason(end),
            sources=[
                self._source(leaf, state.sources[leaf.config.id], end, last.get(leaf.config.id) if leaf.out else None)
                for leaf in self._leaves
            ],
            endings=[
                PlannedEnding(
                    tokens=round(ending.at),
                    sample_index=self._index_at(round(ending.at)),
                    name=ending.name,
                    why=ending.why,
                )
                for ending in flowed.endings
            ],
            segments=[
                PlannedSegment(from_tokens=round(each.begin), until_tokens=round(each.end), shares=each.shares.tolist())
                for each in merged(segments, MAX_SEGMENTS)
                if round(each.begin) < round(each.end)
            ],
        )

    def _enter(self, part: Part, state: State) -> None:
        self._part, self._base = part, state
        self.root, self._leaves = grow(part.config, part.size_estimates, state)
        self._begins.append(_Begin(state.sample_index, state.total_tokens, part.config.sequence_length))

    def _state(self) -> State:
        """Where it stands, as a state of the part that it is in; without what no plan asks for."""
        sources = []
        for leaf, was in zip(self._leaves, self._base.sources, strict=True):
            extent = self._part.size_estimates[leaf.config.id]
            rows, cursor = was.rows, was.cursor
            if leaf.given and extent is not None and extent.tokens_per_1000_rows:
                offset = cursor.offset if self._part.config.packing == "concat" else 0
                read, rest = divmod(round(1000 * (offset + leaf.given)), extent.tokens_per_1000_rows)
                rows, cursor = rows + read, Cursor(offset=rest // 1000)
            samples = was.samples + round(leaf.given / self._part.config.sequence_length)
            sources.append(
                SourceState(
                    cursor=cursor,
                    samples=samples,
                    rows=rows,
                    tokens=was.tokens + round(leaf.given),
                    exhausted=leaf.out,
                )
            )
        nodes = {
            branch.config.id: tuple(
                ChildState(was.samples, round(tokens), 0, out)
                for was, tokens, out in zip(
                    self._base.nodes[branch.config.id], branch.given.tolist(), branch.exhausted.tolist(), strict=True
                )
            )
            for branch in self.root.downwards()
        }
        return replace(self._base, sources=tuple(sources), nodes=tuple(nodes[i] for i in range(len(nodes))))

    def _index_at(self, tokens: int) -> int:
        begin = next((begin for begin in reversed(self._begins) if begin.tokens <= tokens), self._begins[0])
        return begin.sample_index + (tokens - begin.tokens) // begin.sequence_length

    def _source(self, leaf: Leaf, now: SourceState, end: int, exhausted_at: int | None) -> PlannedSource:
        extent = self._part.size_estimates[leaf.config.id]
        return PlannedSource(
            id=leaf.config.id,
            spec=leaf.config.source,
            alias=leaf.config.name,
            rows=None if extent is None else extent.rows,
            tokens_per_row=None if extent is None else extent.tokens_per_1000_rows / 1000,
            tokens_per_epoch=None if extent is None else extent.tokens,
            epochs=None if math.isinf(leaf.epochs) else leaf.epochs,
            epochs_read=None if extent is None or not extent.rows else now.rows / extent.rows,
            tokens=now.tokens,
            share=now.tokens / end if end else 0.0,
            exhausted=leaf.out,
            exhausted_at_tokens=exhausted_at,
            exhausted_at_sample=None if exhausted_at is None else self._index_at(exhausted_at),
        )

    def _reason(self, end: int) -> str:
        root, leaves = self.root, self._leaves
        if self.flowed.endless:
            names = ", ".join(leaf.name for leaf in leaves if math.isinf(leaf.left) and not leaf.out)
            return f"nothing ends any more: {names} is read for ever; say how many tokens to plan further"
        if not root.over:
            return f"the run has the {end:,} tokens that were asked for"
        if root.stopped:
            return f"the mixture {root.stopped}"
        if root.waits:
            return "only paused sources are left"
        if all(leaf.out or leaf.config.presence == "dropped" for leaf in leaves):
            return "every source is exhausted"
        stopped = [f"{branch.name} {branch.stopped}" for branch in root.downwards() if branch.stopped]
        return "; ".join(stopped) or "nothing is left that is not paused"


def _padded(segment: PlanSegment, sources: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Sources that came later had no share."""
    return np.pad(segment.shares, (0, sources - len(segment.shares)))

"""The plan of a run: the mixer itself, over what its sources have left, from a state on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import (
    MAX_COUNTER,
    FileCursor,
    SourceState,
    State,
    passed_over,
    tokens_in_row,
)
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.errors import ConfigError
from tokenloom_server.mixing.mixer import Ending, Mixer
from tokenloom_server.mixing.totals import rows_of
from tokenloom_server.order.carry_over import carry
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.returning import Returning
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.plan import PlannedEnding, PlannedSegment, PlannedSource, RunPlan
from tokenloom_server.planning.segments import MAX_SEGMENTS, PlanSegment, merged


class Supply:
    """The picks that the rest of a source's rows hold, and where its rows counter stands after some of them."""

    def __init__(
        self, config: RunConfig, source: int, curve: TokenCurve | None, state: SourceState
    ) -> None:
        """``curve``: None for a source that was dropped, which gives nothing."""
        self.curve = (
            curve if config.balances_real or curve is None else TokenCurve(curve.rows, curve.tokens)
        )
        #: Picks that were given since the state.
        self.given = 0
        self._balance = config.balanced(state)
        self.epochs = config.epochs[source]
        self._pick_tokens = config.pick_tokens
        # Of samples that are padded, no part of the tokens is a row's.
        self._cuts_rows = config.packing == "concat"
        self._begin = 0
        #: Picks that are left from the state on, at most MAX_COUNTER, as where the source is read for ever.
        self.picks = 0
        if curve is None:
            return
        self._begin = curve.tokens_before(state.rows) + (
            tokens_in_row(state.cursor) if self._cuts_rows else 0
        )
        if state.exhausted or not curve.epoch_tokens:
            return
        if math.isinf(self.epochs):
            self.picks = MAX_COUNTER
            return
        # With shifted labels the last sample is followed by one token more.
        needed = self._begin + (config.labels == "shifted" and self._cuts_rows)
        tokens = curve.tokens_before(rows_of(curve.epoch_rows, self.epochs)) - needed
        self.picks = min(MAX_COUNTER, max(0, tokens // self._pick_tokens))

    @property
    def real_tokens(self) -> int:
        """See ``RealLengths``; positions where balances count these."""
        return self._balance + self._real(self.given) - self._real(0)

    def real_lengths(self) -> Iterator[int]:
        """See ``RealLengths``."""
        return (
            after - before
            for before, after in pairwise(map(self._real, range(self.given, self.picks + 1)))
        )

    def real_of(self, picks: int) -> int:
        """See ``RealLengths``."""
        return self._real(self.given + picks) - self._real(self.given)

    def _real(self, picks: int) -> int:
        """The real tokens before the end of so many picks, counted as those of the curve."""
        token = self._begin + picks * self._pick_tokens
        return token if self.curve is None else self.curve.real_before(token)

    def rows_picked(self) -> tuple[int, int]:
        """The rows counter, and the tokens of the row that is not at its end, after the last pick."""
        if self.curve is None:
            return 0, 0
        token = self._begin + self.given * self._pick_tokens
        row = self.curve.row_at(token)
        return row, token - self.curve.tokens_before(row) if self._cuts_rows else 0


#: Up to so many picks are decided one by one, as the run does it; longer plans go by each policy's mean shares.
EXACT_PICKS = 2_000_000
#: Picks that are decided at a time.
_BURST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What decides the run from a sample index on: a mixture, and how much its sources have."""

    config: RunConfig
    #: By source id; None for one that was dropped.
    curves: Sequence[TokenCurve | None]
    #: What the run's policies go by, of the ``measured_sources``, by id; the curves' if not given.
    size_estimates: Mapping[int, TokenCurve] = field(default_factory=dict)
    #: The run's total tokens there.
    tokens: int = 0
    #: Sources that have more files than before.
    grown: tuple[int, ...] = ()
    #: Sources that come back, as the revision says that begins here.
    returning: tuple[Returning, ...] = ()
    #: So many samples are passed over before the first.
    skip: int = 0


def forecast(
    parts: Sequence[Part], state: State, until: int | None = None, *, exact_picks: int = EXACT_PICKS
) -> RunPlan:
    """What the run will be from a state on, up to the first sample that reaches ``until`` total tokens or, for None, to
    its end; where nothing ever ends, for as many tokens as its sources have once."""
    if until is not None and until <= state.total_tokens:
        raise ConfigError(
            f"tokens: {until} tokens are asked for, but the run has {state.total_tokens} already; the number counts "
            "from the run's beginning: give a larger one"
        )
    simulation = _Simulation(parts[0], state, exact_picks)
    for part in parts[1:]:
        simulation.go(part.tokens if until is None else min(part.tokens, until))
        if simulation.reason is not None or simulation.tokens < part.tokens:
            break
        simulation.enter(part)
    else:
        simulation.go(until)
    if simulation.endless and not simulation.segments:
        # Nothing that the mixture reads ever runs out, so a plan has no end of its own.
        simulation.go(simulation.tokens + simulation.one_epoch)
    return simulation.plan(state)


class _Simulation:
    """A run on its way through its parts."""

    def __init__(self, part: Part, state: State, exact_picks: int) -> None:
        self.tokens = state.total_tokens
        self._index = state.sample_index
        self._until: int | None = None
        self._exact_picks = exact_picks
        #: Why the data ended; None while they go on.
        self.reason: str | None = None
        #: Nothing ends any more: what is left is read for ever.
        self.endless = False
        self.segments: list[PlanSegment] = []
        self._endings: list[PlannedEnding] = []
        #: By source id, the last ending of it.
        self._out_at: dict[int, PlannedEnding] = {}
        self._begin(part, state)

    def go(self, until: int | None) -> None:
        """Goes on to the first sample that reaches so many tokens of the run, or to the end of data."""
        self._until, size = until, self._config.pick_tokens
        picks = MAX_COUNTER if until is None else max(0, -(-(until - self.tokens) // size))
        if min(picks, self._mixer.room, sum(self._left.tolist())) <= self._exact_picks:
            self._exact_picks -= self._decide(picks)
        else:
            self._leap(picks)
        self._cut()

    @property
    def one_epoch(self) -> int:
        """Tokens that the sources have once, one pick at least."""
        tokens = sum(
            supply.curve.epoch_tokens for supply in self._supplies if supply.curve is not None
        )
        return max(tokens, self._config.pick_tokens)

    def enter(self, part: Part) -> None:
        """Goes on in the next part, where this one ends."""
        self._begin(
            part, carry(self._state(), self._config, part.config, part.grown, part.returning)
        )
        if part.skip:
            before, segments = self._state(), list(self.segments)
            self.go(self.tokens + part.skip * part.config.sequence_length)
            after, self.segments = self._state(), segments
            self._index, self.tokens = before.sample_index, before.total_tokens
            self._begin(part, passed_over(before, after))

    def plan(self, start: State) -> RunPlan:
        config, state = self._config, self._state()
        count = len(self._supplies)
        # Sources that came later had no share.
        segments = [
            replace(each, shares=np.pad(each.shares, (0, count - len(each.shares))))
            for each in self.segments
        ]
        segments = [
            replace(each, shares=each.shares / each.shares.sum())
            for each in merged(segments, MAX_SEGMENTS)
        ]
        return RunPlan.of(
            config,
            count="real" if config.balances_real else "positions",
            from_sample_index=start.sample_index,
            from_tokens=start.total_tokens,
            until_sample_index=self._index,
            until_tokens=self.tokens,
            ends=self.reason is not None,
            reason=self._why_here(),
            sources=list(self._sources(state)),
            endings=self._endings,
            segments=[
                PlannedSegment(
                    from_tokens=round(each.begin),
                    until_tokens=round(each.end),
                    shares=each.shares.tolist(),
                )
                for each in segments
            ],
        )

    def _begin(self, part: Part, state: State) -> None:
        self._config, self._start = part.config, state
        self._supplies = [
            Supply(part.config, source, curve, was)
            for source, (curve, was) in enumerate(zip(part.curves, state.sources, strict=True))
        ]
        #: Picks that are left, by source (int64).
        self._left = np.array([supply.picks for supply in self._supplies], np.int64)
        estimates = {
            source: curve
            for source, supply in enumerate(self._supplies)
            if (curve := part.size_estimates.get(source, supply.curve))
            and source in part.config.measured_sources
        }
        lengths = self._supplies if part.config.balances_real else None
        self._mixer = Mixer(
            part.config, state.nodes, estimates, lengths, clock_offset=state.clock_ahead
        )
        self._mix_weights, self._weights = self._mixer.mix_weights, self._mixer.weights()
        self._known: dict[tuple[int, int], Ending] = self._mixer.endings()
        self._begin_segment()

    def _decide(self, picks: int) -> int:
        """Decides up to so many picks as the run does it; returns how many there were."""
        mixer, done = self._mixer, 0
        while done < picks:
            index = self._index // self._config.pick_samples
            decided = mixer.decide(min(picks - done, _BURST), index, self.tokens, self)
            self._follow_weights()
            if len(decided) < 2:
                # What has nothing to give is found by a pick that is decided by itself.
                self._note_endings()
            if not len(decided):
                self.reason = mixer.why_over()
                break
            self._count(np.bincount(decided, minlength=len(self._left)))
            done += len(decided)
        return done

    def _leap(self, picks: int) -> None:
        """Goes up to so many picks on by mean shares."""
        mixer, left = self._mixer, picks
        while left and not mixer.is_over:
            by_source = mixer.leap(left, self._left.tolist(), self.tokens, self.rows_picked)
            if by_source is None:
                self.endless = True
                return
            counts = np.zeros_like(self._left)
            counts[list(by_source)] = list(by_source.values())
            self._count(counts)
            self._cut()
            self._note_endings()
            left -= sum(by_source.values())
        if mixer.is_over:
            self.reason = mixer.why_over()

    def has_sample(self, source: int) -> bool:
        """See ``Stock``, which this is to the mixer."""
        return bool(self._left[source])

    def shortages(self, picks: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """See ``Stock``."""
        for source in np.flatnonzero(picks > self._left[: len(picks)]).tolist():
            yield source, int(self._left[source])

    def _count(self, counts: npt.NDArray[np.int64]) -> None:
        for source in np.flatnonzero(counts).tolist():
            self._supplies[source].given += int(counts[source])
        # What is read for ever stays as much.
        self._left -= np.where(self._left == MAX_COUNTER, 0, counts)
        picks = int(counts.sum())
        self._index += picks * self._config.pick_samples
        self.tokens += picks * self._config.pick_tokens

    def rows_picked(self, source: int) -> tuple[int, int]:
        """See ``Stock``."""
        return self._supplies[source].rows_picked()

    def _cut(self) -> None:
        """Ends a segment here."""
        tokens = self._balances() - self._segment_balances
        if length := self.tokens - self._segment_begin:
            # Of real tokens these are parts of the positions, so that segments that are joined keep what they have.
            self.segments.append(
                PlanSegment(float(self._segment_begin), float(self.tokens), tokens / length)
            )
            if len(self.segments) > 4 * MAX_SEGMENTS and len(self.segments[0].shares) == len(
                tokens
            ):
                self.segments = merged(self.segments, MAX_SEGMENTS)
        self._begin_segment()

    def _begin_segment(self) -> None:
        self._segment_begin, self._segment_balances = self.tokens, self._balances()

    def _balances(self) -> npt.NDArray[np.int64]:
        """What balances count of each source."""
        return np.array([supply.real_tokens for supply in self._supplies], np.int64)

    def _follow_weights(self) -> None:
        """Ends a segment where other weights are in force than in it."""
        if self._mixer.mix_weights is self._mix_weights:
            return
        before, self._weights, self._mix_weights = (
            self._weights,
            self._mixer.weights(),
            self._mixer.mix_weights,
        )
        if self._weights != before:
            self._cut()

    def _note_endings(self) -> None:
        endings = self._mixer.endings()
        for key, ending in endings.items():
            if key not in self._known:
                noted = PlannedEnding(
                    tokens=self.tokens, sample_index=self._index, name=ending.name, why=ending.why
                )
                self._endings.append(noted)
                if ending.source is not None:
                    self._out_at[ending.source] = noted
        self._known = endings

    def _state(self) -> State:
        """Where it stands, as a state of the part that it is in; without what no plan asks for."""
        mixer, balances = self._mixer, self._balances().tolist()
        since = [supply.given * self._config.pick_samples for supply in self._supplies]
        sources = []
        for source, (was, out) in enumerate(
            zip(self._start.sources, mixer.exhausted(mixer.mix_weights), strict=True)
        ):
            rows, cursor = was.rows, was.cursor
            if since[source]:
                rows, tokens_in_row = self.rows_picked(source)
                cursor = FileCursor(0, 0, 0, tokens_in_row)
            tokens = was.tokens + since[source] * self._config.sequence_length
            samples, counts = was.samples + since[source], was.row_counts
            if self._config.balances_real:
                counts = counts._replace(padding_tokens=tokens - balances[source])
            now = replace(
                was, cursor=cursor, samples=samples, rows=rows, tokens=tokens, row_counts=counts
            )
            sources.append(replace(now, exhausted=out))
        return replace(
            self._start,
            sample_index=self._index,
            total_tokens=self.tokens,
            sources=tuple(sources),
            nodes=mixer.states(mixer.mix_weights, since, balances),
        )

    def _sources(self, state: State) -> Iterator[PlannedSource]:
        balances = self._balances().tolist()
        total = sum(balances)
        for source, now, supply in zip(
            self._config.sources, state.sources, self._supplies, strict=True
        ):
            curve, out = supply.curve, self._out_at.get(source.id) if now.exhausted else None
            yield PlannedSource(
                id=source.id,
                spec=source.source,
                alias=source.name,
                rows=None if curve is None else curve.epoch_rows,
                tokens_per_row=None
                if curve is None
                else curve.epoch_tokens / max(1, curve.epoch_rows),
                tokens_per_epoch=None if curve is None else round(curve.epoch_tokens),
                epochs=None if math.isinf(supply.epochs) else supply.epochs,
                epochs_read=None
                if curve is None or not curve.epoch_rows
                else now.rows / curve.epoch_rows,
                tokens=now.tokens,
                share=balances[source.id] / total if total else 0.0,
                exhausted=now.exhausted,
                exhausted_at_tokens=None if out is None else out.tokens,
                exhausted_at_sample=None if out is None else out.sample_index,
            )

    def _why_here(self) -> str:
        """Why the data, or the plan, end here."""
        if self.reason is not None:
            return self.reason
        if self.endless:
            live = zip(self._config.sources, self._supplies, self._mixer.shares(), strict=True)
            names = ", ".join(
                source.name
                for source, supply, share in live
                if supply.picks == MAX_COUNTER and share
            )
            return f"nothing ends any more: {names} is read for ever; say how many tokens to plan further"
        return f"the run has the {self._until:,} tokens that were asked for"


class Planner:
    """Thread-safe; one plan is made at a time."""

    def __init__(self, measuring: Callable[[str], object] | None = None) -> None:
        """``measuring`` is called with a source's name before it is measured."""
        self._measuring = measuring
        self._lock = threading.Lock()
        # By spec and files: a revision may append some.
        self._measured: dict[tuple[str, tuple[str, ...]], TokenCurve] = {}
        # Every rank of a launch asks for the same.
        self._last: tuple[Timeline, State, int | None, RunPlan] | None = None

    def plan(self, timeline: Timeline, state: State, until: int | None) -> RunPlan:
        """From a state on (see ``forecast``). Raises also what ``measure`` raises."""
        with self._lock:
            if (
                self._last is not None
                and self._last[0] is timeline
                and self._last[1:3] == (state, until)
            ):
                return self._last[3]
            plan = forecast(list(self._parts(timeline, state)), state, until)
            self._last = timeline, state, until, plan
            return plan

    def _parts(self, timeline: Timeline, state: State) -> Iterator[Part]:
        """The parts of a run that a plan from a state on goes through."""
        first = max(
            i for i, segment in enumerate(timeline.segments) if segment.begin <= state.sample_index
        )
        for segment in timeline.segments[first:]:
            factory = segment.factory
            yield Part(
                config=factory.config,
                curves=[
                    self._curve(factory, source.id) if source.presence != "dropped" else None
                    for source in factory.config.sources
                ],
                size_estimates=factory.record.size_estimates,
                tokens=segment.tokens,
                grown=segment.grown,
                returning=segment.returning,
                skip=segment.skip,
            )

    def _curve(self, factory: PipelineFactory, source_id: int) -> TokenCurve:
        spec, files = factory.record.specs[source_id], factory.record.shard_paths[source_id]
        curve = factory.record.size_estimates.get(source_id) or self._measured.get((spec, files))
        if curve is None:
            if self._measuring is not None:
                self._measuring(factory.config.sources[source_id].name)
            curve = self._measured[spec, files] = measure(factory, source_id)
        # Rows that are left out are read as rows without tokens.
        excluded = factory.record.excluded.count(spec)
        return (
            curve.scaled(Fraction(max(0, curve.epoch_rows - excluded), curve.epoch_rows))
            if excluded
            else curve
        )

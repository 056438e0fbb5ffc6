"""The samples of an order once more, from a state that is known: what all who look at the past, or evaluate, read.

This module makes the samples; ``run.past`` decides on which thread, and for how long it may take.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenloom_server.core.state import State
from tokenloom_server.errors import BeyondHorizon, OrderMismatch, SourceError, TokenizerError
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline

#: A turn goes forward by so many tokens at most: about a second of one core.
TURN_TOKENS = 2**20
#: Or bytes, where rows travel as they are.
TURN_BYTES = 2**25


class Replay:
    """Goes forward over the samples of a timeline: ``turn`` by turn to a sample index, and from there on by groups of
    ``samples``. For one thread at a time.

    A fault in the data is met where it lies: samples before it come first. After an error the replay is of no use.
    """

    def __init__(self, timeline: Timeline, state: State) -> None:
        self.timeline = timeline.with_clock(state.clock_offset)
        #: Why there are no more samples; None while there may be some.
        self.ended: str | None = None
        #: Samples of an incomplete last micro-step, which were left out.
        self.dropped_samples = 0
        # The state to begin at, while there is no pipeline.
        self._state = state
        self._pipeline: Pipeline | None = None
        self._step_by_step = False

    @property
    def sample_index(self) -> int:
        pipeline = self._pipeline  # another thread may look how far it is
        return self._state.sample_index if pipeline is None else pipeline.sample_index

    def state(self) -> State:
        """The state at the present sample index."""
        return self._state if self._pipeline is None else self._pipeline.state()

    def is_before(self, index: int) -> bool:
        """Whether a further turn comes nearer to a sample index."""
        return self.sample_index < index and self.ended is None

    def turn(self, index: int) -> None:
        """Goes a bit further, at most to a sample index. Raises ``SourceError`` and ``TokenizerError``."""
        pipeline = self._begun()
        pipeline.advance(min(index - self.sample_index, self._turn_samples()))
        self.ended = pipeline.ended

    def takes_turns(self, index: int) -> bool:
        """Whether a sample index is more than a turn away."""
        return index - self.sample_index > self._turn_samples()

    def _turn_samples(self) -> int:
        factory = self.timeline.at(self.sample_index)
        if factory.config.batching is None:
            return max(1, TURN_TOKENS // factory.config.sequence_length)
        pick = factory.config.pick_samples
        return max(1, TURN_BYTES // (pick * factory.form.sample_bytes)) * pick

    def forward(self, index: int) -> State:
        """Goes all the way to a sample index, or as far as the data go; returns the state there. Raises ``SourceError``
        and ``TokenizerError``."""
        while self.is_before(index):
            self.turn(index)
        return self.state()

    def groups(self, end: int) -> Iterator[StepGroup]:
        """The samples before an index, one pick a micro-step; each group lies in one segment of the timeline. Ends
        where the data end, or samples have another length. Raises what ``samples`` does."""
        while self.is_before(end):
            begin, segment_end = self.sample_index, self.timeline.segment_end(self.sample_index)
            pick = self.timeline.at(begin).config.pick_samples
            yield self.samples(pick, -(-(min(end, segment_end) - begin) // pick))

    def samples(self, batch_size: int, steps: int) -> StepGroup:
        """The next micro-steps of a world of one; fewer where the data end, or a fault lies ahead. Raises
        ``SourceError`` and ``TokenizerError`` where the next micro-step has one."""
        steps = 1 if self._step_by_step else steps
        pipeline = self._begun()
        plan = BatchPlan(
            start_index=self.sample_index,
            world_size=1,
            batch_size=batch_size,
            group_micro_steps=steps,
        )
        group = pipeline.begin_group(plan)
        try:
            pipeline.fill(group, steps)
        except (SourceError, TokenizerError):
            self._state, self._pipeline = group.base, None
            if steps == 1:
                raise
            self._step_by_step = True
            return self.samples(batch_size, 1)
        self.ended, self.dropped_samples = pipeline.ended, pipeline.dropped_samples
        return group

    def switch_to(self, timeline: Timeline) -> None:
        """Goes on under another timeline. Raises ``OrderMismatch`` where that differs before the present sample."""
        if timeline is self.timeline or timeline.clock_offset != self.timeline.clock_offset:
            return  # by another clock the run goes on from elsewhere
        different = {*self.timeline.revisions} ^ {*timeline.revisions}
        changed = min((revision.sample_index for revision in different), default=self.sample_index)
        if changed < self.sample_index:
            raise OrderMismatch(
                f"the mixture was revised at sample {changed} while this peek was at sample {self.sample_index}: what "
                "it saw after that is not the run's order any more; peek again"
            )
        self.timeline = timeline
        if self._pipeline is not None and timeline.skips.get(self.sample_index):
            self.rest()
        if self._pipeline is not None:
            self._pipeline.replace_switches(timeline.switches(self.sample_index))

    @property
    def rests(self) -> bool:
        """Whether it holds no data: before the first turn, and after ``rest``."""
        return self._pipeline is None

    def rest(self) -> None:
        """Lets go of what it has read; it goes on from its state."""
        self._state, self._pipeline = self.state(), None

    def _begun(self) -> Pipeline:
        self._pipeline = self._pipeline or self.timeline.pipeline(self._state)
        return self._pipeline


def beyond_the_end(index: int, end: int) -> BeyondHorizon:
    """The error for a sample after the last one."""
    return BeyondHorizon(f"sample {index} does not exist: the data end at sample {end}")

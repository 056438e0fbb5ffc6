"""A sample index that is far away: not gone forward to where the data end long before."""

from __future__ import annotations

from tokenloom_server.core.state import State
from tokenloom_server.errors import SnapshotInvalid, SourceError, TokenizerError
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.planner import Planner

#: Beyond so many samples the sources are measured before, which takes seconds.
FAR_SAMPLES = 2**16
#: Of a large source only parts are read to measure it: the data may have so many times what is estimated.
MARGIN = 10


def refuse_beyond_data(timeline: Timeline, state: State, index: int) -> None:
    """Raises ``SnapshotInvalid`` where a far sample index cannot be reached from a state, by the size of the data."""
    if index - state.sample_index <= FAR_SAMPLES:
        return
    try:
        plan = Planner().plan(timeline, state, None)
    except (SourceError, TokenizerError):
        return  # what is wrong there is met on the way
    if plan.ends and index > MARGIN * plan.until_sample_index:
        raise SnapshotInvalid(
            f"the state to resume from is at sample {index}, but the data end at about sample "
            f"{plan.until_sample_index} ({plan.reason}): resume from one up to there, or give the run more data first"
        )

"""A sample index that is far away: not gone forward to where the data end long before; how far it is, otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from tokenloom_server.core.state import State
from tokenloom_server.errors import SnapshotInvalid, SourceError, TokenizerError
from tokenloom_server.order.replay import Replay
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.planner import Planner

_log = logging.getLogger(__name__)

#: Beyond so many samples the sources are measured before, which takes seconds.
FAR_SAMPLES = 2**16
#: Of a large source only parts are read to measure it: the data may have so many times what is estimated.
MARGIN = 10
#: How often it is said how far the way to a far sample is, seconds.
REPORT_EVERY_S = 5.0


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


class WayForward:
    """How the way forward to a far sample stands that is asked for."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        #: For people; empty where none is asked for.
        self.text = ""

    @contextmanager
    def reported(self, replay: Replay, index: int) -> Iterator[Callable[[], None]]:
        """What is to be called before each turn of a replay to a sample index. Where that takes several turns it says
        at once, and every few seconds, how far it is and when it will be there: in the log and in the stats."""
        start, began = replay.sample_index, self._clock()
        report_at = began if replay.takes_turns(index) else float("inf")

        def report() -> None:
            nonlocal report_at
            now, made = self._clock(), replay.sample_index - start
            if now < report_at:
                return
            report_at = now + REPORT_EVERY_S
            left_s = (index - start - made) * (now - began) / made if made else 0.0
            pace = f", {made / (now - began):.0f} samples/s, {timedelta(seconds=round(left_s))} to go" if made else ""
            self.text = f"from sample {start} to {index}: at sample {start + made}{pace}"
            _log.info("%s: going forward %s", self._name, self.text)

        try:
            yield report
        finally:
            self.text = ""

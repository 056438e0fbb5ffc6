"""What a stream of a run is given: micro-steps, the end of the data, or why there is nothing yet."""

from __future__ import annotations

from typing import NamedTuple

from tokenloom_server.core.measures import WaitReason
from tokenloom_server.order.steps import StepGroup


class Delivery(NamedTuple):
    """Micro-steps [first, last) of a group for one rank; ``with_base`` when the stream lacks the group's base."""

    group: StepGroup
    first: int
    last: int
    with_base: bool


class EndOfData(NamedTuple):
    """No sample follows ``end_index``; ``reason`` says why, for people."""

    end_index: int
    reason: str
    dropped_samples: int


class Waiting(NamedTuple):
    """Nothing to send within the time; what the run waits for, for people. Empty, and without a reason: for nothing."""

    waiting_for: str = ""
    reason: WaitReason | None = None

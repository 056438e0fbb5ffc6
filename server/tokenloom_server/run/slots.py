"""The ranks' places in a generation, and what is true of all of them. The sole owner of both.

What every micro-step asks about all ranks (how far the slowest is, whether one has nothing left) is kept
here as they move, so that a micro-step costs the same with 1,000 ranks as with one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenloom_server.core.measures import RankState

#: What a rank waited is counted over one or two spans of a length: lately, and to tell whether one holds others up,
#: which a checkpoint that one of them writes is not to look like. Seconds.
WAIT_SPAN_S, LONG_SPAN_S = 15.0, 300.0


class WaitShare(NamedTuple):
    """The part of the last so many seconds that a rank waited for data (0 to 1)."""

    share: float
    seconds: float


@dataclass(slots=True)
class Waits:
    """What a rank waited over the last one or two spans."""

    span_s: float
    #: (time, seconds) of one or two earlier reports, a span apart.
    _earlier: tuple[tuple[float, float], ...] = ()

    def note(self, waited_s: float, now: float) -> None:
        if not self._earlier or now - self._earlier[-1][0] >= self.span_s:
            self._earlier = (*self._earlier[-1:], (now, waited_s))

    def until(self, waited_s: float, now: float | None) -> WaitShare | None:
        """Up to a report at ``now``; None where it is the first one."""
        if not self._earlier or now is None or now <= self._earlier[0][0]:
            return None
        since, before_s = self._earlier[0]
        return WaitShare(min(1.0, (waited_s - before_s) / (now - since)), now - since)


@dataclass(slots=True)
class Slot:
    """One rank's place; positions are micro-steps from the generation's start. Changed by ``Slots`` alone.

    ``session`` tells the present stream from an earlier one of the same process.
    """

    rank: int
    nonce: str | None = None
    #: The client's, as its Join said; empty where it did not, or joined another server.
    release: str = ""
    session: int = 0
    connected: bool = False
    sent: int = 0
    consumed: int = 0
    credit_micro_steps: int = 1
    last_heard: float | None = None
    #: The client said goodbye: nobody waits for the slot until it comes again.
    left: bool = False
    #: Since when the stream has had all that is produced, and more is held back by other ranks.
    starved_since: float | None = None
    #: Begin of the group whose base the present stream has.
    base_index: int | None = None
    ended: bool = False
    #: For how long the rank has waited for data since it joined, as it reports, seconds.
    waited_s: float = 0.0
    _lately: Waits = field(default_factory=lambda: Waits(WAIT_SPAN_S))
    _longer: Waits = field(default_factory=lambda: Waits(LONG_SPAN_S))

    def note_wait(self, waited_s: float, now: float) -> None:
        """The rank reports for how long it has waited for data since it joined."""
        if self.waited_s < waited_s < math.inf:
            self.waited_s = waited_s
        for waits in (self._lately, self._longer):
            waits.note(self.waited_s, now)

    @property
    def wait_share(self) -> float | None:
        """The part of its last half a minute that it waited for data (0 to 1); None where it has not reported twice."""
        lately = self._lately.until(self.waited_s, self.last_heard)
        return lately and lately.share

    @property
    def long_wait(self) -> WaitShare | None:
        """The same of its last ten minutes at most."""
        return self._longer.until(self.waited_s, self.last_heard)

    @property
    def state(self) -> RankState:
        """Of the rank, in a word."""
        if self.connected:
            return "connected"
        # Without a message of its own: the server before this one noted that none trains, and not why.
        return "finished" if self.left and self.last_heard is not None else "away"

    @property
    def is_free(self) -> bool:
        """Whether no process was ever heard to have it."""
        return self.last_heard is None and not self.session and not self.left


class Slots:
    """The slots by rank."""

    def __init__(self, world_size: int, position: int) -> None:
        """``position``: the micro-step that every rank is at."""
        self._slots = [Slot(rank, sent=position, consumed=position) for rank in range(world_size)]
        #: How many ranks have a stream.
        self.connected = 0
        #: Micro-steps that every rank has consumed.
        self.consumed_by_all = position
        #: The most micro-steps that a rank with a stream was sent; −1 where no rank has one.
        self.sent_to_one = -1
        self._ranks_at_least = world_size

    def __getitem__(self, rank: int) -> Slot:
        return self._slots[rank]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def join(self, slot: Slot, now: float, release: str) -> None:
        """The slot is a process's that joined, of a client of this release."""
        slot.last_heard, slot.left, slot.release = now, False, release

    def attach(self, slot: Slot, step: int, now: float) -> None:
        """A new stream of the slot begins after a micro-step."""
        slot.session += 1
        slot.connected = True
        slot.sent = step
        slot.consumed = min(slot.consumed, step)
        slot.base_index = None
        slot.ended = False
        slot.last_heard = now
        slot.left = False
        slot.starved_since = None
        self._recount()

    def detach(self, slot: Slot) -> None:
        """The slot's stream is over."""
        slot.connected = False
        self._recount()

    def send(self, slot: Slot, step: int) -> None:
        """The slot was sent everything up to a micro-step."""
        slot.sent = step
        slot.starved_since = None
        self.sent_to_one = max(self.sent_to_one, step)

    def consume(self, slot: Slot, step: int) -> None:
        """The slot has consumed everything up to a micro-step, if that is news."""
        if step <= slot.consumed:
            return
        was_last = slot.consumed == self.consumed_by_all
        slot.consumed = step
        if was_last:
            self._ranks_at_least -= 1
            if not self._ranks_at_least:
                self._recount()

    def all_heard(self, at_s: float | None) -> None:
        """Every rank was last heard at this time, or none trains any more (None), as the server before this noted."""
        for slot in self._slots:
            slot.last_heard, slot.left = at_s, at_s is None

    def heard_at(self) -> float | None:
        """When the rank that has been silent longest was heard; None where one was never, or has left."""
        heard = [None if slot.left else slot.last_heard for slot in self._slots]
        return None if None in heard else min(time for time in heard if time is not None)

    def laggards(self) -> Iterator[Slot]:
        """The slots that hold the others back."""
        return (slot for slot in self._slots if slot.consumed == self.consumed_by_all)

    def _recount(self) -> None:
        """Looks at every slot; each rank brings that about at most once a micro-step."""
        positions = [slot.consumed for slot in self._slots]
        self.consumed_by_all = min(positions)
        self._ranks_at_least = positions.count(self.consumed_by_all)
        streams = [slot.sent for slot in self._slots if slot.connected]
        self.connected = len(streams)
        self.sent_to_one = max(streams, default=-1)

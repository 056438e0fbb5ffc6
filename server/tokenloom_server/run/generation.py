"""One generation of a live run: what was produced, sent, consumed and committed. The sole owner of that.
And what a stream of a run is given: micro-steps, the end of the data, or why there is nothing yet.

Pure logic: no clock, thread, socket or ledger. The callers (the parts of a run) hold its lock, pass the
time in, and do the slow things outside. Micro-steps are counted from the generation's start.

    committed ≤ acknowledged (by all) ≤ consumed (by a rank) ≤ sent ≤ produced ≤ committed + window
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tokenloom_server.core.measures import WaitReason
from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import (
    AttemptUsed,
    BeyondHorizon,
    Fenced,
    JoinRefused,
    LedgerRolledBack,
    OrderMismatch,
)
from tokenloom_server.order.batch_plans import BatchPlans
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.run.sizing import horizon_of
from tokenloom_server.run.slots import Slot, Slots


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


#: Ranks that a message names, at most.
_NAMED = 8
#: Groups that are made ready beyond what any rank was sent.
LEAD_GROUPS = 4


@dataclass(slots=True)
class Generation:
    """See the module. ``number`` and ``attempt`` identify it; ``committed`` is where the ledger stands."""

    number: int
    attempt: str
    batch_plans: BatchPlans
    #: For each of the plans, how many micro-steps may be produced ahead of the committed one.
    windows: Sequence[int]
    #: For each of the plans, the micro-steps of a full message; a group ends one, too.
    message_steps: Sequence[int]
    #: Whether the last micro-step may end elsewhere than all others.
    pads_last_micro_step: bool = False
    committed: int = 0
    produced: int = 0
    #: The micro-step up to which production may go.
    horizon: int = field(init=False)
    groups: deque[StepGroup] = field(default_factory=deque)
    slots: Slots = field(init=False)
    end: EndOfData | None = None
    #: Micro-steps whose ids are let go, because every rank has consumed them.
    released: int = 0
    #: By rank: the micro-step and digest that it has, where that is still to be produced (again).
    claims: dict[int, tuple[int, str]] = field(default_factory=dict)
    _burst: int = 1
    #: The number of the first group that is held.
    _first_group: int = field(init=False)

    def __post_init__(self) -> None:
        self.slots = Slots(self.batch_plans.world_size, self.committed)
        # After a restart of the server, production begins again at the boundary before the committed micro-step.
        self.produced = self.released = self.first_needed
        self._first_group = self.batch_plans.at_step(self.produced).group_number(self.produced)
        self.horizon = horizon_of(self.batch_plans, self.windows, self.committed)

    @property
    def window_micro_steps(self) -> int:
        """How many micro-steps may be produced ahead of the committed one."""
        return self.horizon - self.committed

    @property
    def first_needed(self) -> int:
        """The micro-step at which production (again) begins for the committed micro-step to be known."""
        return self.batch_plans.group_begin(self.committed - 1) if self.committed else 0

    @property
    def over(self) -> bool:
        """Whether the data ended and all of them are committed."""
        return self.end is not None and self.committed == self.produced

    # --- positions ---------------------------------------------------------------------------------

    def index_of(self, step: int) -> int:
        """The sample index at which the first ``step`` micro-steps end."""
        if self.end is not None and step == self.produced:
            return self.end.end_index
        return self.batch_plans.index_of(step)

    def step_at(self, sample_index: int, name: str) -> int:
        """The number of micro-steps that end at a sample index. Raises ``JoinRefused`` where none does."""
        if self.end is not None and sample_index == self.end.end_index:
            return self.produced
        step, rest = self.batch_plans.steps_until(sample_index)
        if rest and step >= self.produced and self.end is None and self.pads_last_micro_step:
            # The padded last micro-step, which a client may hold before a restarted server has produced it again.
            return step + 1
        if rest or step < 0:
            plan = self.batch_plans.at_index(sample_index)
            raise JoinRefused(
                f"{name} is sample {sample_index}, but no micro-step of generation {self.number} ends there: "
                f"micro-steps have {plan.step_samples} samples and begin at {plan.start_index}"
            )
        return step

    def group_of(self, step: int) -> StepGroup:
        """The group that holds a micro-step (0-based)."""
        index = self.batch_plans.at_step(step).group_number(step) - self._first_group
        if 0 <= index < len(self.groups):
            return self.groups[index]
        raise BeyondHorizon(
            f"micro-step {step} of generation {self.number} is not held; micro-steps {self.committed} on are"
        )

    def digest_after(self, steps: int) -> str:
        """The rolling digest after the first ``steps`` micro-steps of those that are held."""
        if steps == self.batch_plans.group_begin(steps):
            for group in self.groups:
                if group.begin == self.index_of(steps):
                    return digest_hex(group.base.digest)
        group = self.group_of(steps - 1)
        return digest_hex(group.marks[steps - 1 - group.first_step].digest)

    # --- production --------------------------------------------------------------------------------

    def steps_wanted(self) -> int:
        """How many micro-steps to produce now: 0 to wait. They never cross a state boundary.

        Waits for room for half a window (or the rest of the group), so that bursts and messages stay
        large, unless a rank has nothing left. Stops a few groups ahead of the rank that was sent most: what
        waits longer only leaves the processor's cache.
        """
        # After a restart, a rank may come back only to acknowledge what it had, and be gone before it is
        # produced again; without that it could not be committed.
        owed = self.acknowledged() > self.produced
        if self.end is not None or not (owed or self.slots.connected):
            return 0
        plan = self.batch_plans.at_step(self.produced)
        room = self.horizon - self.produced
        rest = plan.group_end(self.produced) - self.produced
        ahead = self.produced - self.slots.sent_to_one
        if ahead >= LEAD_GROUPS * plan.group_micro_steps and not owed:
            return 0
        starving = owed or ahead <= 0
        if room <= 0 or (room < min(rest, self.window_micro_steps // 2) and not starving):
            return 0
        return min(room, rest, self._burst)

    def filled(self, group: StepGroup, ended: str | None, dropped_samples: int) -> None:
        """The newest group, or the next one, got micro-steps (or the data ended)."""
        if not self.groups or self.groups[-1] is not group:
            self.groups.append(group)
        self.produced = group.first_step + len(group.marks)
        self._release()
        # The first micro-steps of a generation go out one by one: somebody is waiting.
        self._burst = min(2 * self._burst, group.plan.group_micro_steps)
        if ended is not None:
            self.end = EndOfData(group.end, ended, dropped_samples)

    # --- slots -------------------------------------------------------------------------------------

    def attach(
        self,
        rank: int,
        nonce: str,
        received_through: int,
        committed_through: int,
        now: float,
        digest: str = "",
    ) -> int:
        """A stream of a slot begins after ``received_through``, where the client has the rolling digest ``digest``
        (empty: it does not say); returns its session number.

        Raises ``AttemptUsed`` (another process's slot), ``LedgerRolledBack`` (the client saw a later
        commit than the ledger holds) and ``JoinRefused`` (a position that no micro-step ends at, or that was
        committed by all and is no longer held).
        """
        slot = self._slot(rank, nonce)
        committed_index = self.index_of(self.committed)
        if committed_through > committed_index:
            raise LedgerRolledBack(
                f"rank {rank} saw a commit at sample {committed_through}, but the ledger is at {committed_index}: it "
                f"lost data. {LedgerRolledBack.remedy}"
            )
        step = self.step_at(received_through, f"rank {rank}'s received_through")
        if step < max(self.committed, self.released):
            acknowledged = self.index_of(max(self.committed, self.released))
            raise JoinRefused(
                f"rank {rank} goes on at sample {received_through}, but all ranks acknowledged {acknowledged}; "
                "restart the training job from its checkpoint"
            )
        if digest:
            self.claim(rank, step, digest)
        self.slots.attach(slot, step, now)
        return slot.session

    def leave(self, rank: int, session: int) -> None:
        """The client of the stream said goodbye."""
        slot = self.slots[rank]
        if slot.session == session:
            slot.left = True

    def claim(self, rank: int, step: int, digest: str) -> None:
        """A rank says what the rolling digest is after a micro-step. Raises ``OrderMismatch`` where it is another here,
        at once or, after a restart, as soon as the micro-step is produced again (``check_claims``)."""
        if step > self.produced:
            self.claims[rank] = step, digest
        elif step > self._held_from():
            self._check_claim(rank, step, digest)

    def check_claims(self) -> None:
        """Raises ``OrderMismatch`` where a rank was sent something else than what is produced now."""
        for rank, (step, digest) in list(self.claims.items()):
            if step <= self.produced:
                del self.claims[rank]
                if step > self._held_from():
                    self._check_claim(rank, step, digest)

    def detach(self, rank: int, session: int) -> None:
        """The stream ended; a newer one of the slot is left alone."""
        slot = self.slots[rank]
        if slot.session == session:
            self.slots.detach(slot)

    def progress(
        self,
        rank: int,
        session: int,
        consumed_through: int,
        credit_micro_steps: int,
        now: float,
        digest: str = "",
    ) -> None:
        """A rank consumed up to a sample index, where it has the rolling digest ``digest`` (empty: it does not say).
        An older report changes nothing. Raises ``OrderMismatch`` for another digest than was produced."""
        slot = self._current(rank, session)
        step = self.step_at(consumed_through, f"rank {rank}'s consumed_through")
        if digest:
            self.claim(rank, step, digest)
        if step > slot.sent:
            raise JoinRefused(
                f"rank {rank} reports sample {consumed_through} as consumed, but it was sent nothing beyond "
                f"{self.index_of(slot.sent)}"
            )
        slot.last_heard = now
        # More than the window can never be in flight, whatever a client asks for.
        slot.credit_micro_steps = min(max(1, credit_micro_steps), self.window_micro_steps)
        self.slots.consume(slot, step)
        self._release()

    def has_for(self, rank: int) -> bool:
        """Whether ``next_for`` has something for a slot."""
        slot = self.slots[rank]
        if slot.sent >= self.produced:
            return self.end is not None and not slot.ended
        return self._sendable(slot) > slot.sent

    def next_for(self, rank: int, session: int, flush: bool = False) -> Delivery | EndOfData | None:
        """What to send to a slot now; marks it as sent. None: nothing yet.

        Waits for a full message while the rank has something to go on with, unless ``flush``.
        """
        slot = self._current(rank, session)
        if slot.sent >= self.produced:
            if self.end is None or slot.ended:
                return None
            slot.ended = True
            return self.end
        last = self._sendable(slot, flush)
        if last <= slot.sent:
            return None
        group = self.group_of(slot.sent)
        first = slot.sent - group.first_step
        with_base = slot.base_index != group.begin
        slot.base_index = group.begin
        delivery = Delivery(group, first, first + last - slot.sent, with_base)
        self.slots.send(slot, last)
        return delivery

    def consumed_all(self, rank: int) -> bool:
        """Whether a slot consumed all that was produced."""
        return self.slots[rank].consumed >= self.produced

    # --- commits -----------------------------------------------------------------------------------

    def acknowledged(self) -> int:
        """Micro-steps that every rank has consumed."""
        return self.slots.consumed_by_all

    def commit_due(self) -> int | None:
        """The micro-step count to commit next; None while there is nothing new."""
        # After a restart ranks may have acknowledged more than is produced again; with a smaller window than
        # before, waiting for all of it would be waiting for ever.
        steps = min(self.acknowledged(), self.produced)
        return steps if steps > self.committed else None

    def all_committed(self) -> bool:
        """Whether the ledger holds all that every rank acknowledged."""
        return self.acknowledged() <= self.committed

    def set_committed(self, steps: int) -> None:
        """The ledger holds the first ``steps`` steps: what lies before leaves memory."""
        self.committed = max(self.committed, steps)
        self.horizon = horizon_of(self.batch_plans, self.windows, self.committed)
        keep = self.first_needed
        while len(self.groups) > 1 and self.groups[0].first_step < keep:
            self.groups.popleft()
            self._first_group += 1

    def check_digest(self, expected: str) -> None:
        """Raises ``OrderMismatch`` where what was produced again after a restart is not what was committed."""
        if self.produced < self.committed:
            raise OrderMismatch(
                f"micro-step {self.committed} of generation {self.number} was committed, but produced again the data "
                f"end at sample {self.index_of(self.produced)}: the data, the tokeniser or the software changed; "
                "nothing was delivered"
            )
        digest = self.digest_after(self.committed)
        if digest != expected:
            raise OrderMismatch(
                f"sample {self.index_of(self.committed)} was committed with digest {expected}, but producing it again "
                f"gives {digest}: the data, the tokeniser or the software changed; nothing was delivered"
            )

    def stalled(self, rank: int, session: int, now: float) -> float:
        """For how long, seconds, the stream has had nothing because other ranks do not go on; 0 where it has not."""
        slot = self.slots[rank]
        if slot.session != session:
            return 0.0
        held_back = (
            self.end is None
            and slot.consumed >= self.produced
            and not self.steps_wanted()
            and self.acknowledged() < self.produced
        )
        if not held_back:
            slot.starved_since = None
            return 0.0
        if slot.starved_since is None:
            slot.starved_since = now
        return now - slot.starved_since

    def describe_laggards(self, now: float) -> str:
        """The ranks that hold the others back, with position, lag and when they were heard; for people."""
        ahead = max(slot.consumed for slot in self.slots)
        named = []
        for slot in islice(self.slots.laggards(), _NAMED):
            heard = (
                "never heard"
                if slot.last_heard is None
                else f"last heard {now - slot.last_heard:.0f} s ago"
            )
            lag = self.index_of(ahead) - self.index_of(slot.consumed)
            named.append(
                f"rank {slot.rank} ({slot.state}, {heard}, at sample {self.index_of(slot.consumed)}, "
                f"{lag} less than the first)"
            )
        more = sum(1 for _ in self.slots.laggards()) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")

    # -----------------------------------------------------------------------------------------------

    def _held_from(self) -> int:
        """The first micro-step whose mark is still held."""
        return self.groups[0].first_step if self.groups else self.produced

    def _check_claim(self, rank: int, step: int, digest: str) -> None:
        produced = self.digest_after(step)
        if produced != digest:
            raise OrderMismatch(
                f"rank {rank} has digest {digest} at sample {self.index_of(step)}, but this server's order has "
                f"{produced} there: the ranks no longer see one order, because the data, the tokeniser or the software "
                "changed while they trained; nothing more is served. Restart the training job from its last checkpoint"
            )

    def _release(self) -> None:
        """Lets the ids of groups go that every rank has consumed; their marks stay until they are committed."""
        through = min(self.acknowledged(), self.produced)
        while (end := self.batch_plans.at_step(self.released).group_end(self.released)) <= through:
            self.group_of(self.released).release()
            self.released = end

    def _sendable(self, slot: Slot, flush: bool = False) -> int:
        """The micro-step up to which a message for the slot would go now; what it was sent already for none."""
        number = self.batch_plans.number_at(slot.sent)
        plan, message_steps = self.batch_plans.plans[number], self.message_steps[number]
        begin = plan.group_begin(slot.sent)
        in_message = (slot.sent - begin) % message_steps
        message_end = min(
            slot.sent + message_steps - in_message, begin + plan.group_micro_steps, plan.end_step
        )
        credit_end = slot.consumed + slot.credit_micro_steps
        last = min(self.produced, message_end, credit_end)
        ready = last - slot.sent
        whole = last == message_end or (self.end is not None and last == self.produced)
        halfway = last == credit_end and 2 * ready >= slot.credit_micro_steps
        draining = 4 * (slot.sent - slot.consumed) <= message_steps
        if not draining and self.batch_plans.accumulate > 1:
            # A client may wait for all micro-steps of an optimiser step before it hands out the first.
            draining = (
                slot.sent
                < (slot.consumed // self.batch_plans.accumulate + 1) * self.batch_plans.accumulate
            )
        return last if ready > 0 and (whole or halfway or draining or flush) else slot.sent

    def require_own_slot(self, rank: int, nonce: str) -> None:
        """Raises ``AttemptUsed`` where a rank's slot is known to be another process's."""
        if rank < len(self.slots) and self.slots[rank].nonce not in (None, nonce):
            raise AttemptUsed(
                f"rank {rank} of attempt {self.attempt!r} is another process's. {AttemptUsed.remedy}"
            )

    def _slot(self, rank: int, nonce: str) -> Slot:
        if rank >= self.batch_plans.world_size:
            raise JoinRefused(
                f"rank {rank} is not below the world size {self.batch_plans.world_size}"
            )
        self.require_own_slot(rank, nonce)
        slot = self.slots[rank]
        slot.nonce = nonce
        return slot

    def _current(self, rank: int, session: int) -> Slot:
        slot = self.slots[rank]
        if slot.session != session:
            raise Fenced(f"a newer stream of rank {rank} has taken this one's place")
        return slot

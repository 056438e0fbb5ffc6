"""The logic of one generation: what may be produced, sent, consumed and committed, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
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
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.run.generation import Delivery, EndOfData, Generation


@dataclass
class Point:
    """As much of a mark, or of a state, as the logic looks at."""

    sample_index: int
    digest: int


@dataclass
class FakeGroup:
    """As much of a ``StepGroup`` as the logic looks at."""

    plan: BatchPlan
    first_step: int
    base: Point
    marks: list[Point] = field(default_factory=list)
    released: bool = False

    def release(self) -> None:
        assert not self.released
        self.released = True

    @property
    def begin(self) -> int:
        return self.base.sample_index

    @property
    def end(self) -> int:
        return self.marks[-1].sample_index if self.marks else self.begin


def point(sample_index: int) -> Point:
    return Point(sample_index, sample_index * 7 + 1)


class Producer:
    """Fills a generation's groups as the run does; the data end at a sample index."""

    def __init__(self, generation: Generation, total: int, pad: bool) -> None:
        self.generation = generation
        self.total = total
        self.pad = pad

    def produce(self) -> int:
        """One burst; returns how many steps it had."""
        generation = self.generation
        wanted = generation.steps_wanted()
        if not wanted:
            return 0
        before = generation.produced
        plan = generation.batch_plans.at_step(before)
        assert before + wanted <= plan.group_end(before)
        if before == plan.group_begin(before):
            group = FakeGroup(plan, before, point(plan.index_of(before)))
        else:
            group = cast("FakeGroup", generation.groups[-1])
        ended, dropped = None, 0
        for _ in range(wanted):
            end = group.end + plan.step_samples
            if end > self.total:
                left = self.total - group.end
                if left and self.pad:
                    group.marks.append(point(self.total))
                else:
                    dropped = left
                ended = "every source is exhausted"
                break
            group.marks.append(point(end))
        generation.filled(cast("StepGroup", group), ended, dropped)
        return generation.produced - before


def plan_of(
    start: int = 0, world_size: int = 2, batch_size: int = 3, group_micro_steps: int = 4
) -> BatchPlan:
    return BatchPlan(
        start_index=start,
        world_size=world_size,
        batch_size=batch_size,
        group_micro_steps=group_micro_steps,
    )


def generation_of(
    window: int = 8, committed: int = 0, pads: bool = False, message_steps: int = 0, **plan: int
) -> Generation:
    made = plan_of(**plan)
    messages = [message_steps or made.group_micro_steps]
    return Generation(
        3,
        "attempt",
        BatchPlans.constant(made),
        [window],
        messages,
        pads_last_micro_step=pads,
        committed=committed,
    )


def produced(generation: Generation, total: int = 10**9, pad: bool = False) -> Generation:
    """Everything that may be produced now."""
    producer = Producer(generation, total, pad)
    while producer.produce():
        pass
    return generation


def attached(
    generation: Generation, at: int | None = None, credit_micro_steps: int = 100
) -> list[int]:
    committed = generation.index_of(generation.committed)
    at = committed if at is None else at
    sessions = []
    for rank in range(generation.batch_plans.world_size):
        sessions.append(generation.attach(rank, f"nonce-{rank}", at, committed, 0.0))
        generation.progress(rank, sessions[-1], at, credit_micro_steps, 0.0)
    return sessions


def received(generation: Generation, rank: int, session: int) -> list[tuple[int, int]]:
    """(first, last) step of each message that may go out now; end of data as (-1, index)."""
    found = []
    while (message := generation.next_for(rank, session)) is not None:
        if isinstance(message, EndOfData):
            found.append((-1, message.end_index))
        else:
            begin = message.group.first_step
            found.append((begin + message.first, begin + message.last))
    return found


def sent(window: int = 8, **options: int) -> tuple[Generation, list[int]]:
    """A generation whose ranks were sent all that may be produced, and their streams."""
    generation = generation_of(window, **options)
    sessions = attached(generation)
    produced(generation)
    for rank, session in enumerate(sessions):
        received(generation, rank, session)
    return generation, sessions


# --- production ------------------------------------------------------------------------------------


def test_nothing_is_produced_before_a_rank_is_there() -> None:
    generation = generation_of()
    assert generation.steps_wanted() == 0
    generation.attach(1, "n", 0, 0, 0.0)
    assert generation.steps_wanted() == 1


def test_production_ends_at_the_horizon_and_goes_on_with_the_commit() -> None:
    generation, sessions = sent()
    assert generation.produced == 8
    for rank, session in enumerate(sessions):
        generation.progress(rank, session, 2 * 6, 100, 0.0)
    produced(generation)
    assert generation.produced == 8
    assert generation.commit_due() == 2
    generation.set_committed(2)
    produced(generation)
    assert generation.produced == 10


def test_the_first_steps_go_out_one_by_one() -> None:
    generation = generation_of(window=100, group_micro_steps=16)
    attached(generation)
    producer = Producer(generation, 10**9, False)
    assert [producer.produce() for _ in range(6)] == [1, 2, 4, 8, 1, 16]


def test_a_burst_never_crosses_a_state_boundary() -> None:
    generation = generation_of(window=20, group_micro_steps=5)
    attached(generation)
    produced(generation)
    assert [len(group.marks) for group in generation.groups] == [5] * 4


def test_a_small_gap_is_not_filled_while_every_rank_has_something_to_go_on_with() -> None:
    generation = generation_of(window=8, group_micro_steps=4)
    sessions = attached(generation)
    produced(generation)
    # Sent up to 4 of 8; one step committed: room for one step, which is less than half a window.
    for rank, session in enumerate(sessions):
        generation.progress(rank, session, 0, 4, 0.0)
        assert received(generation, rank, session) == [(0, 4)]
        generation.progress(rank, session, 6, 4, 0.0)
    generation.set_committed(1)
    assert generation.steps_wanted() == 0
    # A rank that has been sent everything is starving.
    generation.progress(0, sessions[0], 6, 100, 0.0)
    received(generation, 0, sessions[0])
    assert generation.steps_wanted() == 1


# --- messages --------------------------------------------------------------------------------------


def test_messages_never_cross_a_boundary_and_each_group_brings_its_base_once() -> None:
    generation = generation_of(window=12, group_micro_steps=4)
    session = attached(generation)[0]
    produced(generation)
    found = []
    while isinstance(message := generation.next_for(0, session), Delivery):
        found.append((message.group.begin, message.first, message.last, message.with_base))
    assert found == [(0, 0, 4, True), (24, 0, 4, True), (48, 0, 4, True)]


def test_a_second_message_of_a_group_brings_no_base_but_a_new_stream_does() -> None:
    generation = generation_of(window=8, group_micro_steps=4)
    session = attached(generation, credit_micro_steps=2)[0]
    produced(generation)
    first = generation.next_for(0, session)
    assert isinstance(first, Delivery)
    assert (first.first, first.last, first.with_base) == (0, 2, True)
    generation.progress(0, session, 12, 2, 0.0)
    second = generation.next_for(0, session)
    assert isinstance(second, Delivery)
    assert (second.first, second.last, second.with_base) == (2, 4, False)
    session = generation.attach(0, "nonce-0", 18, 0, 0.0)
    again = generation.next_for(0, session)
    assert isinstance(again, Delivery)
    assert (again.first, again.last, again.with_base) == (3, 4, True)


def test_no_more_is_sent_than_a_rank_has_credit_for() -> None:
    generation = generation_of(window=40, group_micro_steps=8)
    session = attached(generation, credit_micro_steps=3)[0]
    produced(generation)
    assert received(generation, 0, session) == [(0, 3)]
    generation.progress(0, session, 6, 3, 0.0)
    # One step of credit of three: more comes when there is more to send, or the rank has nothing left.
    generation.progress(0, session, 12, 3, 0.0)
    assert received(generation, 0, session) == [(3, 5)]


def test_credit_beyond_the_window_is_cut_and_none_at_all_is_one_step() -> None:
    generation = generation_of(window=40, group_micro_steps=8)
    session = attached(generation, credit_micro_steps=2**32 - 1)[0]
    assert generation.slots[0].credit_micro_steps == 40
    generation.progress(0, session, 0, 0, 0.0)
    assert generation.slots[0].credit_micro_steps == 1


def test_a_part_of_a_group_is_sent_at_once_where_nothing_more_may_be_produced() -> None:
    generation = generation_of(window=6, group_micro_steps=64)
    session = attached(generation)[0]
    produced(generation)
    assert received(generation, 0, session) == [(0, 6)]


def test_an_error_flushes_what_was_produced() -> None:
    generation = generation_of(window=64, group_micro_steps=64)
    session = attached(generation, credit_micro_steps=64)[0]
    producer = Producer(generation, 10**9, False)
    producer.produce()
    assert received(generation, 0, session) == [(0, 1)]
    for _ in range(5):
        producer.produce()
    assert received(generation, 0, session) == [(1, 63)]
    generation.progress(0, session, 0, 64, 0.0)
    producer.produce()
    assert generation.next_for(0, session) is not None
    assert not generation.consumed_all(0)


@pytest.mark.parametrize(
    ("total", "pad", "end", "dropped"), [(47, False, 42, 5), (47, True, 47, 0), (48, True, 48, 0)]
)
def test_every_rank_ends_at_the_same_step(total: int, pad: bool, end: int, dropped: int) -> None:
    generation = generation_of(window=20)
    sessions = attached(generation)
    produced(generation, total, pad)
    for rank, session in enumerate(sessions):
        assert received(generation, rank, session)[-1] == (-1, end)
        # Once per stream.
        assert generation.next_for(rank, session) is None
        generation.progress(rank, session, end, 9, 0.0)
    assert generation.end == EndOfData(end, "every source is exhausted", dropped)
    assert generation.commit_due() == generation.produced
    generation.set_committed(generation.produced)
    assert generation.index_of(generation.committed) == end
    again = generation.attach(0, "nonce-0", end, end, 0.0)
    assert received(generation, 0, again) == [(-1, end)]


def test_data_may_end_before_the_first_step() -> None:
    generation = generation_of()
    session = attached(generation)[0]
    produced(generation, total=3)
    assert received(generation, 0, session) == [(-1, 0)]
    assert generation.end is not None
    assert generation.end.dropped_samples == 3


# --- slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committed", "rank", "at", "seen", "error", "says"),
    [
        (0, 0, 0, 0, AttemptUsed, "rank 0 of attempt 'attempt' is another process's"),
        (0, 2, 0, 0, JoinRefused, "rank 2 is not below the world size 2"),
        (
            2,
            1,
            18,
            18,
            LedgerRolledBack,
            "rank 1 saw a commit at sample 18, but the ledger is at 12",
        ),
        (2, 1, 6, 6, JoinRefused, "rank 1 goes on at sample 6, but all ranks acknowledged 12"),
    ],
)
def test_a_stream_that_cannot_go_on_is_refused(
    committed: int, rank: int, at: int, seen: int, error: type[Exception], says: str
) -> None:
    generation = generation_of(committed=committed)
    generation.attach(0, "nonce-0", 6 * committed, 0, 0.0)
    with pytest.raises(error, match=says):
        generation.attach(rank, "other", at, seen, 0.0)


def test_a_stream_whose_place_was_taken_hears_so() -> None:
    generation = generation_of()
    old = attached(generation)[0]
    new = generation.attach(0, "nonce-0", 0, 0, 0.0)
    with pytest.raises(Fenced, match="a newer stream of rank 0"):
        generation.next_for(0, old)
    with pytest.raises(Fenced, match="a newer stream of rank 0"):
        generation.progress(0, old, 0, 1, 0.0)
    generation.detach(0, old)
    assert generation.slots[0].connected
    generation.detach(0, new)
    assert not generation.slots[0].connected


@pytest.mark.parametrize("at", [1, 5, 7, -6, -1])
def test_a_position_that_no_step_ends_at_is_refused(at: int) -> None:
    generation = generation_of()
    with pytest.raises(
        JoinRefused, match=f"received_through is sample {at}, but no micro-step of generation 3"
    ):
        generation.attach(0, "nonce-0", at, 0, 0.0)
    session = attached(generation)[0]
    with pytest.raises(JoinRefused, match=f"rank 0's consumed_through is sample {at}"):
        generation.progress(0, session, at, 1, 0.0)


def test_positions_count_from_the_generations_start() -> None:
    generation, (session, _) = sent(start=100)
    generation.progress(0, session, 112, 1, 0.0)
    assert generation.slots[0].consumed == 2
    with pytest.raises(JoinRefused, match="sample 6"):
        generation.attach(0, "nonce-0", 6, 0, 0.0)


def test_what_was_not_sent_cannot_be_consumed() -> None:
    generation = generation_of()
    session = attached(generation)[0]
    produced(generation)
    with pytest.raises(
        JoinRefused, match="reports sample 6 as consumed, but it was sent nothing beyond 0"
    ):
        generation.progress(0, session, 6, 1, 0.0)


def test_an_older_report_changes_nothing() -> None:
    generation, (session, _) = sent()
    generation.progress(0, session, 12, 1, 1.0)
    generation.progress(0, session, 6, 1, 2.0)
    assert (generation.slots[0].consumed, generation.slots[0].last_heard) == (2, 2.0)


def test_a_stream_that_goes_on_behind_less_than_was_consumed_takes_that_back() -> None:
    generation, (session, _) = sent()
    generation.progress(0, session, 24, 1, 0.0)
    generation.attach(0, "nonce-0", 12, 0, 0.0)
    assert (generation.slots[0].consumed, generation.slots[0].sent) == (2, 2)


def test_a_lost_message_is_sent_again_to_the_new_stream() -> None:
    generation = generation_of()
    session = attached(generation)[0]
    produced(generation)
    assert received(generation, 0, session) == [(0, 4), (4, 8)]
    session = generation.attach(0, "nonce-0", 24, 0, 0.0)
    generation.progress(0, session, 24, 100, 0.0)
    assert received(generation, 0, session) == [(4, 8)]


# --- commits ---------------------------------------------------------------------------------------


def test_a_group_of_several_messages_goes_out_message_by_message() -> None:
    generation = generation_of(40, group_micro_steps=10, message_steps=4)
    sessions = attached(generation)
    produced(generation)
    assert received(generation, 0, sessions[0])[:7] == [
        *((0, 4), (4, 8), (8, 10)),
        *((10, 14), (14, 18), (18, 20), (20, 24)),
    ]


def test_ids_go_once_every_rank_has_consumed_them_and_not_only_when_they_are_committed() -> None:
    generation, sessions = sent(window=16)
    generation.progress(0, sessions[0], generation.index_of(12), 16, 0.0)
    generation.progress(1, sessions[1], generation.index_of(9), 16, 0.0)
    assert [cast("FakeGroup", group).released for group in generation.groups] == [
        True,
        True,
        False,
        False,
    ]
    # The marks are still there, for the commit.
    assert generation.digest_after(5) == digest_hex(generation.groups[1].marks[0].digest)
    # What was let go cannot be sent again: nobody may go on in it.
    with pytest.raises(
        JoinRefused, match=f"goes on at sample {generation.index_of(7)}, but all ranks acknowledged"
    ):
        generation.attach(0, "nonce-0", generation.index_of(7), 0, 0.0)
    assert generation.attach(1, "nonce-1", generation.index_of(9), 0, 0.0) == sessions[1] + 1


def test_a_commit_is_due_when_the_slowest_rank_acknowledged() -> None:
    generation, sessions = sent()
    generation.progress(0, sessions[0], 24, 1, 0.0)
    assert generation.commit_due() is None
    assert [slot.rank for slot in generation.slots.laggards()] == [1]
    generation.progress(1, sessions[1], 18, 1, 0.0)
    assert generation.commit_due() == 3
    generation.set_committed(3)
    assert generation.commit_due() is None


def test_a_step_leaves_memory_with_its_group_but_the_boundary_before_the_commit_stays() -> None:
    generation, sessions = sent(window=16)
    for rank, session in enumerate(sessions):
        generation.progress(rank, session, 8 * 6, 1, 0.0)
    generation.set_committed(7)
    assert [group.begin for group in generation.groups] == [24, 48, 72]
    # A snapshot at sample 48 names the boundary at which the group of its last step begins.
    generation.set_committed(8)
    assert [group.begin for group in generation.groups] == [24, 48, 72]
    assert generation.digest_after(8) == digest_hex(point(48).digest)
    with pytest.raises(
        BeyondHorizon, match="micro-step 3 of generation 3 is not held; micro-steps 8 on are"
    ):
        generation.group_of(3)


def test_digests_are_those_behind_each_step() -> None:
    generation, _ = sent()
    for steps in range(1, 9):
        assert generation.digest_after(steps) == digest_hex(point(6 * steps).digest)


# --- restarts of the server ------------------------------------------------------------------------


@pytest.mark.parametrize(("committed", "begin"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_production_begins_again_at_the_boundary_before_the_committed_step(
    committed: int, begin: int
) -> None:
    generation = generation_of(committed=committed)
    assert generation.produced == begin
    sessions = attached(generation)
    produced(generation)
    assert committed < generation.produced <= committed + 8
    assert received(generation, 0, sessions[0])[0][0] == committed
    assert generation.groups[0].begin == 6 * begin
    generation.check_digest(digest_hex(point(6 * committed).digest))
    with pytest.raises(OrderMismatch, match=f"sample {6 * committed} was committed with digest ff"):
        generation.check_digest("ff" * 16)


def test_data_that_end_before_the_committed_step_are_another_order() -> None:
    generation = generation_of(committed=5)
    attached(generation)
    produced(generation, total=27)
    with pytest.raises(
        OrderMismatch, match="micro-step 5 of generation 3 was committed, but produced again"
    ):
        generation.check_digest(digest_hex(point(30).digest))


def test_a_rank_that_holds_more_than_is_produced_again_waits_for_it() -> None:
    generation = generation_of(committed=2)
    session = attached(generation, at=5 * 6)[0]
    assert generation.next_for(0, session) is None
    produced(generation)
    assert received(generation, 0, session)[0][0] == 5


def test_a_rank_with_another_digest_is_found_out_at_once_or_when_its_step_is_produced_again() -> (
    None
):
    generation = generation_of(committed=2)
    right, wrong = digest_hex(point(30).digest), "ab" * 16
    generation.attach(0, "n", 30, 0, 0.0, right)
    generation.attach(1, "m", 30, 0, 0.0, wrong)
    producer = Producer(generation, 10**9, False)
    while generation.produced < 5:
        generation.check_claims()
        producer.produce()
    with pytest.raises(
        OrderMismatch, match=rf"rank 1 has digest {wrong} at sample 30, but .* has {right} there"
    ):
        generation.check_claims()
    generation.progress(0, 1, 30, 8, 0.0, right)
    with pytest.raises(OrderMismatch, match="rank 0 has digest"):
        generation.progress(0, 1, 30, 8, 0.0, wrong)
    assert generation.slots[0].consumed == 5, "what was right before is kept"


def test_only_a_rank_that_others_hold_back_is_starved_and_they_are_named() -> None:
    generation = generation_of(window=4)
    first, second = attached(generation)
    produced(generation)
    assert generation.stalled(0, first, 1.0) == 0, "it has something to take"
    generation.next_for(0, first)
    generation.progress(0, first, generation.index_of(generation.produced), 9, 2.0)
    assert generation.stalled(0, first, 3.0) == 0
    assert generation.stalled(0, first, 10.5) == 7.5
    assert generation.stalled(0, first + 1, 11.0) == 0, "another stream of the slot"
    assert generation.stalled(0, first, 12.0) == 9.0
    assert generation.stalled(1, second, 12.0) == 0
    expected = "rank 1 (connected, last heard 12 s ago, at sample 0, 24 less than the first)"
    assert generation.describe_laggards(12.0) == expected
    generation.next_for(1, second)
    generation.progress(1, second, generation.index_of(generation.produced), 9, 13.0)
    assert generation.stalled(0, first, 60.0) == 0, (
        "all are at the same place: it waits for the server"
    )


def test_a_run_is_heard_only_while_every_rank_is() -> None:
    generation = generation_of()
    assert generation.slots.heard_at() is None
    first = generation.attach(0, "n", 0, 0, 5.0)
    assert generation.slots.heard_at() is None
    generation.attach(1, "m", 0, 0, 7.0)
    assert generation.slots.heard_at() == 5.0
    generation.progress(0, first, 0, 1, 9.0)
    assert generation.slots.heard_at() == 7.0
    generation.leave(0, first + 1)
    assert generation.slots.heard_at() == 7.0
    generation.leave(0, first)
    assert generation.slots.heard_at() is None, "it said goodbye"
    generation.attach(0, "n", 0, 0, 11.0)
    assert generation.slots.heard_at() == 7.0


def test_a_smaller_window_after_a_restart_does_not_stop_the_run() -> None:
    # Every rank consumed eight steps, two are committed, and the window is now four.
    generation = generation_of(window=4, committed=2)
    for rank, session in enumerate(attached(generation, at=10 * 6)):
        generation.progress(rank, session, 10 * 6, 4, 0.0)
    for _ in range(20):
        produced(generation)
        due = generation.commit_due()
        if due is not None:
            assert due <= generation.produced
            generation.set_committed(due)
    assert (generation.committed, generation.produced) == (10, 14)


def test_a_rank_may_come_back_with_the_padded_last_step() -> None:
    # The restarted server does not know yet that the data end at sample 47.
    generation = generation_of(committed=6, pads=True)
    session = generation.attach(0, "n", 47, 36, 0.0)
    generation.progress(0, session, 47, 4, 0.0)
    assert generation.next_for(0, session) is None
    produced(generation, total=47, pad=True)
    assert received(generation, 0, session) == [(-1, 47)]
    other = generation.attach(1, "m", 36, 36, 0.0)
    generation.progress(1, other, 36, 4, 0.0)
    assert received(generation, 1, other) == [(6, 8), (-1, 47)]
    generation.progress(1, other, 47, 4, 0.0)
    assert generation.commit_due() == 8
    assert generation.index_of(8) == 47

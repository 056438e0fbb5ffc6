"""Which steps a generation has, against a loop that takes one step after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tokenloom_proto.batch_schedule import MAX_ACCUMULATE, MAX_SIZES, BatchSchedule
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.order.batch_plans import BatchPlans
from tokenloom_server.order.steps import BatchPlan

WORLD_SIZE = 3


class Drawn(NamedTuple):
    """A batch_plans, and what it was laid from."""

    batch_plans: BatchPlans
    schedule: BatchSchedule
    start_index: int
    start_tokens: int
    sample_tokens: int


def group_micro_steps(batch_size: int) -> int:
    return 1 + 7 * batch_size % 5


def drawn(seed: int) -> Drawn:
    rng = random.Random(seed)
    sizes = [(0, rng.randint(1, 6))]
    for _ in range(rng.randint(0, 6)):
        sizes.append(
            (
                sizes[-1][0] + rng.choice([1, rng.randint(1, 200), rng.randint(1, 2000)]),
                rng.randint(1, 6),
            )
        )
    schedule = BatchSchedule(tuple(sizes), rng.choice([1, 1, 2, 5]))
    start_index, sample_tokens = rng.choice([0, 17, 400]), rng.choice([1, 8])
    # What restores and other phases did before makes tokens and samples differ.
    start_tokens = start_index * sample_tokens + rng.choice([0, 0, 3, 900])
    batch_plans = BatchPlans.lay(
        schedule,
        start_index=start_index,
        start_tokens=start_tokens,
        sample_tokens=sample_tokens,
        world_size=WORLD_SIZE,
        group_micro_steps=group_micro_steps,
    )
    return Drawn(batch_plans, schedule, start_index, start_tokens, sample_tokens)


def steps_of(found: Drawn) -> Iterator[tuple[int, int, int]]:
    """(begin, batch size, begin of its group) of each step, as the words of ``BatchSchedule`` have it."""
    index, size, step, group, in_group = found.start_index, 0, 0, found.start_index, 0
    while True:
        if step % found.schedule.accumulate == 0:
            tokens = found.start_tokens + (index - found.start_index) * found.sample_tokens
            now = [size for begin, size in found.schedule.sizes if begin <= tokens][-1]
            if now != size or in_group == group_micro_steps(size):
                group, in_group = index, 0
            size = now
        elif in_group == group_micro_steps(size):
            group, in_group = index, 0
        yield index, size, group
        index += size * WORLD_SIZE
        step += 1
        in_group += 1


@pytest.mark.parametrize("seed", range(20))
def test_plans_have_the_steps_that_a_loop_takes(seed: int) -> None:
    found = drawn(seed)
    batch_plans = found.batch_plans
    groups = -1
    last = None
    for step, (begin, size, group) in zip(range(1200), steps_of(found), strict=False):
        plan = batch_plans.at_step(step)
        end = begin + size * WORLD_SIZE
        assert (plan.batch_size, plan.group_micro_steps, batch_plans.index_of(step)) == (
            size,
            group_micro_steps(size),
            begin,
        )
        assert batch_plans.at_index(begin) is batch_plans.at_index(end - 1) is plan
        assert batch_plans.steps_until(begin) == (step, 0)
        assert batch_plans.steps_until(end - 1) == (step, size * WORLD_SIZE - 1)
        groups += group != last
        last = group
        assert plan.group_number(step) == groups
        assert batch_plans.index_of(batch_plans.group_begin(step)) == group
        assert batch_plans.boundary(begin + 1) == batch_plans.boundary(end) == group
        assert batch_plans.group_begin(plan.group_end(step)) == plan.group_end(step) > step
        assert batch_plans.boundary_after(begin) == batch_plans.index_of(plan.group_end(step))
    assert batch_plans.boundary(batch_plans.start_index) == batch_plans.start_index
    again = BatchPlans.read(batch_plans.text, batch_plans.plans[0])
    assert (again.plans, again.schedule) == (batch_plans.plans, batch_plans.schedule)


@pytest.mark.parametrize("seed", range(20))
def test_plans_that_are_laid_from_the_middle_go_on_with_the_same_steps(seed: int) -> None:
    found = drawn(seed)
    rng = random.Random(seed)
    for step in (rng.randint(0, 80) * found.schedule.accumulate for _ in range(10)):
        index = found.batch_plans.index_of(step)
        tokens = found.start_tokens + (index - found.start_index) * found.sample_tokens
        rest = BatchPlans.lay(
            found.schedule,
            start_index=index,
            start_tokens=tokens,
            sample_tokens=found.sample_tokens,
            world_size=WORLD_SIZE,
            group_micro_steps=group_micro_steps,
        )
        assert [rest.index_of(i) for i in range(400)] == [
            found.batch_plans.index_of(step + i) for i in range(400)
        ]


def test_a_ledger_of_before_has_a_constant_size() -> None:
    first = BatchPlan(start_index=6, world_size=2, batch_size=3, group_micro_steps=4)
    assert BatchPlans.constant(first).text == ""
    assert BatchPlans.read("", first).plans == (first,)


def test_thresholds_far_away_cost_nothing() -> None:
    """Where the size changes is worked out, and not gone to."""
    schedule = BatchSchedule(((0, 1), (10**15, 2), (MAX_COUNTER, 3)))
    batch_plans = BatchPlans.lay(
        schedule,
        start_index=0,
        start_tokens=0,
        sample_tokens=2048,
        world_size=1,
        group_micro_steps=lambda size: 64,
    )
    assert batch_plans.plans[0].end_step == -(-(10**15) // 2048)
    assert batch_plans.at_step(2**60).batch_size == 3


@pytest.mark.parametrize(
    ("sizes", "accumulate", "message"),
    [
        (((0, 4),), 0, f"accumulate is 0; expected 1 to {MAX_ACCUMULATE} micro-steps"),
        (((5, 4),), 1, "begins at 5 total tokens; expected 0"),
        (
            ((0, 4), (9, 0)),
            1,
            r"batch_size\[1\] has a batch size of 0; expected 1 to 1048576 samples per rank",
        ),
        (
            ((0, 4), (9, 8), (9, 16)),
            1,
            r"batch_size\[2\] begins at 9 total tokens; expected more than 9",
        ),
        (((0, 4), (2**53, 8)), 1, r"and at most 2\^53 − 1"),
        (tuple((i, 1) for i in range(MAX_SIZES + 1)), 1, "has 1025 pairs; expected 1 to 1024"),
    ],
)
def test_what_is_no_schedule_is_refused(
    sizes: tuple[tuple[int, int], ...], accumulate: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSchedule(sizes, accumulate).check()


def test_a_schedule_is_named_in_words() -> None:
    assert str(BatchSchedule(((0, 4),))) == "4"
    assert str(BatchSchedule(((0, 4), (1000, 8)))) == "4, 8 from 1000 total tokens on"

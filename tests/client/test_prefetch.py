"""How many steps a client fetches ahead, where their size changes."""

from __future__ import annotations

import random

import pytest
from tokenloom.connection.join import BatchPlan, StepSchedule
from tokenloom_proto.errors import ProtocolError

WORLD_SIZE = 2


def test_one_size_has_one_capacity() -> None:
    schedule = StepSchedule([BatchPlan(10, 3, 8)], world_size=WORLD_SIZE)
    assert [schedule.capacity_steps(index) for index in (10, 16, 10**9)] == [32, 32, 32]
    assert schedule.half_of_capacity(10) == 16 * 3 * WORLD_SIZE


def test_two_optimiser_steps_are_fetched_at_least_and_what_was_asked_for_is_kept_to() -> None:
    plans = [BatchPlan(0, 3, 8)]
    assert StepSchedule(plans, world_size=1, accumulate=40).capacity_steps(0) == 80
    assert StepSchedule(plans, world_size=1, accumulate=4, prefetch_steps=5).capacity_steps(0) == 5


@pytest.mark.parametrize("seed", range(40))
def test_what_is_held_is_never_more_than_one_plan_would_hold(seed: int) -> None:
    rng = random.Random(seed)
    plans, sizes = [], []
    for _ in range(rng.randint(1, 5)):
        plan = BatchPlan(sum(sizes) * WORLD_SIZE, rng.randint(1, 9), rng.randint(1, 6))
        plans.append(plan)
        sizes += [plan.batch_size] * rng.randint(1, 60)
    sizes += [plans[-1].batch_size] * 200
    schedule = StepSchedule(plans, world_size=WORLD_SIZE)
    most = max(4 * plan.group_micro_steps * plan.batch_size for plan in plans)
    least = min(4 * plan.group_micro_steps for plan in plans)
    end = 0
    for step in range(len(sizes) - 100):
        capacity = schedule.capacity_steps(sum(sizes[:step]) * WORLD_SIZE)
        assert capacity >= least
        assert sum(sizes[step : step + capacity]) <= most
        assert step + capacity >= end, "credits were taken back"
        end = step + capacity


def test_a_size_that_changes_within_a_step_is_a_fault_of_the_server() -> None:
    with pytest.raises(
        ProtocolError, match="micro-steps of 2 × 3 samples from 10 on cannot end at 20"
    ):
        StepSchedule([BatchPlan(10, 3, 8), BatchPlan(20, 4, 8)], world_size=WORLD_SIZE)

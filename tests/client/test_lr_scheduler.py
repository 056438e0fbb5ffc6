"""A learning rate by tokens."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from tokenloom import TokenLRScheduler


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)])


def schedule(of: torch.optim.Optimizer | None = None, **changes: Any) -> TokenLRScheduler:
    arguments = {"warmup_tokens": 100, "target_tokens": 1100, "min_lr_ratio": 0.1} | changes
    return TokenLRScheduler(of or optimizer(), **arguments)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [(0, 0.0), (25, 0.25), (100, 1.0), (600, 0.55), (1100, 0.1), (10**12, 0.1)],
)
def test_the_rate_rises_linearly_then_falls_as_a_cosine_and_stays_at_its_minimum(tokens: int, rate: float) -> None:
    scheduler = schedule()

    scheduler.step(tokens)

    assert scheduler.get_last_lr() == [pytest.approx(rate)]
    assert scheduler.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_the_rate_is_equal_to_the_bit_however_the_run_came_there() -> None:
    small, large = schedule(), schedule()
    for tokens in range(0, 731, 10):
        small.step(tokens)
    for tokens in range(0, 731, 73):
        large.step(tokens)
    resumed = schedule()
    resumed.load_state_dict(small.state_dict())
    fresh = schedule(last_total_tokens=730)

    assert small.get_last_lr() == large.get_last_lr() == resumed.get_last_lr() == fresh.get_last_lr()
    assert resumed.optimizer.param_groups[0]["lr"] == small.get_last_lr()[0]


def test_each_parameter_group_keeps_its_own_base_rate() -> None:
    scheduler = schedule(optimizer(1.0, 0.5))

    scheduler.step(50)

    assert scheduler.get_last_lr() == [0.5, 0.25]


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(1.0)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = schedule(adam)

    scheduler.step(50)

    assert adam.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_a_rollback_may_go_back_in_tokens() -> None:
    scheduler = schedule()
    scheduler.step(600)
    scheduler.step(50)

    assert scheduler.get_last_lr() == [0.5]


def test_steps_before_and_after_the_optimizers_give_no_warning() -> None:
    scheduler = schedule()
    scheduler.step(10)
    scheduler.step(20)
    scheduler.optimizer.step()
    scheduler.step(30)


def test_a_schedule_without_warm_up_begins_at_the_full_rate() -> None:
    assert schedule(warmup_tokens=0).get_last_lr() == [1.0]


def test_the_state_is_plain_numbers_and_a_loaded_schedule_that_differs_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = schedule(target_tokens=2e3).state_dict()
    scheduler = schedule()
    with caplog.at_level(logging.WARNING, "tokenloom"):
        scheduler.load_state_dict(saved)

    assert saved == {
        "total_tokens": 0,
        "base_lrs": [1.0],
        "warmup_tokens": 100,
        "target_tokens": 2000,
        "min_lr_ratio": 0.1,
    }
    assert scheduler.target_tokens == 2000
    assert "target_tokens: the loaded 2000 replaces 1100" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_tokens": -1}, "warmup_tokens must not be negative; got -1"),
        ({"warmup_tokens": 1.5}, "warmup_tokens must be a whole number"),
        ({"target_tokens": 0, "warmup_tokens": 0}, "target_tokens must be at least 1"),
        ({"target_tokens": 50}, "not below warmup_tokens; got warmup_tokens=100, target_tokens=50"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio must be between 0 and 1; got 1.5"),
        ({"min_lr_ratio": math.nan}, "min_lr_ratio must be between 0 and 1"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**changes)


def test_a_step_without_a_sensible_count_is_refused() -> None:
    for tokens in (-1, "many", None):
        with pytest.raises(ValueError, match="total_tokens must"):
            schedule().step(tokens)  # type: ignore[arg-type]


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="has the keys"):
        schedule().load_state_dict({"last_epoch": 3})
    with pytest.raises(ValueError, match="the state has 2 parameter groups, the optimizer 1"):
        schedule().load_state_dict(schedule(optimizer(1.0, 2.0)).state_dict())

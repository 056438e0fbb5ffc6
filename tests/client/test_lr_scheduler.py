"""A learning rate by tokens."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from tokenloom import TokenLRScheduler


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)]
    )


def schedule(of: torch.optim.Optimizer | None = None, **changes: Any) -> TokenLRScheduler:
    arguments = {"warmup_tokens": 100, "target_tokens": 1100, "min_lr_ratio": 0.1} | changes
    return TokenLRScheduler(of or optimizer(), **arguments)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, {0: 0.0, 25: 0.25, 100: 1.0, 600: 0.55, 1100: 0.1, 10**12: 0.1}),
        ({"warmup_tokens": 0}, {0: 1.0}),
        ({"shape": "linear"}, {100: 1.0, 600: 0.55, 1000: 0.19, 1100: 0.1, 5000: 0.1}),
        ({"shape": "constant", "target_tokens": None}, {50: 0.5, 100: 1.0, 10**12: 1.0}),
        (
            {"shape": "inverse_sqrt", "target_tokens": None},
            {50: 0.5, 100: 1.0, 400: 0.5, 900: 1 / 3, 10**6: 0.1},
        ),
        (
            {"shape": "wsd", "decay_start_tokens": 700},
            {99: 0.99, 100: 1.0, 700: 1.0, 800: 0.775, 1100: 0.1},
        ),
        (
            {"shape": "wsd", "decay_start_tokens": 700, "decay_shape": "cosine"},
            {700: 1.0, 900: 0.55, 1100: 0.1},
        ),
        (
            {"shape": "wsd", "decay_start_tokens": 700, "decay_shape": "one_minus_sqrt"},
            {700: 1.0, 800: 0.55, 2000: 0.1},
        ),
        ({"shape": "wsd", "decay_start_tokens": 1100}, {1099: 1.0, 1100: 0.1}),
    ],
)
def test_each_shape_has_its_closed_form(changes: dict[str, Any], rates: dict[int, float]) -> None:
    scheduler = schedule(**changes)
    for tokens, rate in rates.items():
        scheduler.step(tokens)

        assert scheduler.get_last_lr() == [pytest.approx(rate, rel=1e-12)], tokens
        assert scheduler.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "inverse_sqrt", "wsd"])
def test_every_shape_goes_on_to_the_bit_with_another_batch_size(shape: str) -> None:
    start = {"decay_start_tokens": 700} if shape == "wsd" else {}
    alone, before = schedule(shape=shape, **start), schedule(shape=shape, **start)
    for tokens in range(0, 601, 10):
        before.step(tokens)
    after = schedule(shape=shape, **start)
    after.load_state_dict(before.state_dict())
    fresh = schedule(shape=shape, last_total_tokens=600, **start)
    assert fresh.get_last_lr() == after.get_last_lr() == before.get_last_lr()
    for tokens in range(600, 1300, 50):
        after.step(tokens)
        alone.step(tokens)

        assert after.get_last_lr() == alone.get_last_lr()


def test_a_checkpoint_that_counted_steps_goes_on_by_its_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = torch.optim.lr_scheduler.LinearLR(optimizer(0.5)).state_dict() | {"total_tokens": 600}
    scheduler = schedule()
    with caplog.at_level(logging.WARNING, "tokenloom"):
        scheduler.load_state_dict(older)

    assert scheduler.total_tokens == 600
    assert scheduler.get_last_lr() == [pytest.approx(0.5 * 0.55)]
    assert "goes on at its 600 tokens by the schedule given here" in caplog.text


def test_each_parameter_group_keeps_its_own_base_rate_also_when_it_goes_back_in_tokens() -> None:
    scheduler = schedule(optimizer(1.0, 0.5))

    scheduler.step(600)
    scheduler.step(50)

    assert scheduler.get_last_lr() == [0.5, 0.25]


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(1.0)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = schedule(adam)

    scheduler.step(50)

    assert adam.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_steps_before_and_after_the_optimizers_give_no_warning() -> None:
    scheduler = schedule()
    scheduler.step(10)
    scheduler.step(20)
    scheduler.optimizer.step()
    scheduler.step(30)


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
        "shape": "cosine",
        "warmup_tokens": 100,
        "target_tokens": 2000,
        "decay_start_tokens": None,
        "decay_shape": "linear",
        "min_lr_ratio": 0.1,
    }
    assert scheduler.target_tokens == 2000
    assert "target_tokens: the loaded 2000 replaces 1100" in caplog.text
    assert "base_lrs" not in caplog.text

    with caplog.at_level(logging.WARNING, "tokenloom"):
        scheduler.load_state_dict(saved | {"base_lrs": [0.5]})
    assert "base_lrs: the loaded [0.5] replaces [1.0]" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_tokens": -1}, "warmup_tokens must not be negative; got -1"),
        ({"warmup_tokens": 1.5}, "warmup_tokens must be a whole number"),
        ({"target_tokens": 0, "warmup_tokens": 0}, "target_tokens must be at least 1"),
        ({"target_tokens": 50}, "not below warmup_tokens; got warmup_tokens=100, target_tokens=50"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio must be between 0 and 1; got 1.5"),
        ({"min_lr_ratio": math.nan}, "min_lr_ratio must be between 0 and 1"),
        (
            {"shape": "cosinus"},
            "shape must be one of cosine, linear, constant, inverse_sqrt, wsd; got 'cosinus'",
        ),
        ({"target_tokens": None}, "target_tokens is missing: cosine has its end there"),
        (
            {"shape": "inverse_sqrt", "warmup_tokens": 0},
            "warmup_tokens must be at least 1 with inverse_sqrt",
        ),
        ({"decay_start_tokens": 500}, "belong to wsd; leave them out with shape='cosine'"),
        (
            {"shape": "linear", "decay_shape": "cosine"},
            "belong to wsd; leave them out with shape='linear'",
        ),
        ({"shape": "wsd"}, "wsd needs decay_start_tokens, between warmup_tokens and target_tokens"),
        (
            {"shape": "wsd", "decay_start_tokens": 99},
            "warmup_tokens=100, decay_start_tokens=99, target_tokens=1100",
        ),
        (
            {"shape": "wsd", "decay_start_tokens": 1101},
            "decay_start_tokens=1101, target_tokens=1100",
        ),
        (
            {"shape": "wsd", "decay_start_tokens": 500, "decay_shape": "sqrt"},
            "decay_shape must be one of linear",
        ),
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
    with pytest.raises(
        ValueError, match="must have total_tokens beside them; got \\['last_epoch'\\]"
    ):
        schedule().load_state_dict({"last_epoch": 3})
    with pytest.raises(ValueError, match="the state has 2 parameter groups, the optimizer 1"):
        schedule().load_state_dict(schedule(optimizer(1.0, 2.0)).state_dict())

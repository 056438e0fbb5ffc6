"""How long a run is, in tokens and steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenloom import TokenBudget


def budget(**changes: Any) -> TokenBudget:
    given: dict[str, Any] = {
        "context_length": 128,
        "batch_size": 4,
        "world_size": 2,
        "dataset_samples": 1003,
    }
    return TokenBudget(**given | changes)


def test_a_model_that_shifts_labels_itself_learns_one_token_less_of_each_sample() -> None:
    inside, shifted = budget(), budget(shifts_inside=False)

    assert (inside.tokens_per_sample, shifted.tokens_per_sample) == (127, 128)
    assert (inside.tokens_per_step, shifted.tokens_per_step) == (8 * 127, 8 * 128)
    assert (inside.dataset_tokens, shifted.dataset_tokens) == (1003 * 127, 1003 * 128)


def test_the_whole_dataset_is_the_target_where_the_factor_is_0() -> None:
    found = budget(accumulate=3)

    assert found.samples_per_step == 24
    assert (found.dataset_steps, found.target_steps) == (42, 42)
    assert found.target_tokens == found.dataset_tokens
    assert found.target_total_tokens == 1003 * 128
    assert found.target_epochs == 1.0


def test_a_factor_counts_tokens_for_each_parameter() -> None:
    found = budget(parameters=10_000, factor=20)

    assert found.target_tokens == 200_000
    assert found.target_samples == 1575  # 200,000 / 127, rounded up
    assert found.target_total_tokens == 1575 * 128
    assert found.target_steps == 197
    assert found.target_epochs == pytest.approx(200_000 / (1003 * 127))


def test_the_start_lines_of_a_log() -> None:
    assert budget(parameters=10_000, factor=20).lines() == [
        "Dataset estimate: steps=126 tokens=127381 tokens_per_step=1016",
        "Target:          epochs=1.57 target_steps=197 target_tokens=200000 (factor 20)",
    ]
    endless = budget(ends=False, parameters=1000, factor=1.5).lines()
    assert endless[0].endswith(
        "tokens_per_step=1016 (one epoch of every source; the data never end)"
    )
    unknown = budget(dataset_samples=None, parameters=1000, factor=1.5).lines()
    assert unknown[0].startswith("Dataset estimate: steps=unknown tokens=unknown")
    assert unknown[1].startswith(
        "Target:          epochs=unknown target_steps=2 target_tokens=1500"
    )


@settings(
    max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)  # as slow as the machine is busy
@given(
    samples=st.integers(0, 500),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    gaps=st.lists(st.integers(1, 900), min_size=4, max_size=4),
    world=st.integers(1, 3),
    accumulate=st.integers(1, 3),
)
def test_steps_under_a_batch_schedule_are_those_of_a_count_by_hand(
    samples: int, sizes: list[int], gaps: list[int], world: int, accumulate: int
) -> None:
    length = 7
    begins = [sum(gaps[:i]) for i in range(len(sizes))]
    found = budget(
        context_length=length,
        batch_size=list(zip(begins, sizes, strict=True)),
        world_size=world,
        accumulate=accumulate,
    )
    steps = at = 0
    while True:
        size = next(
            size
            for begin, size in reversed(list(zip(begins, sizes, strict=True)))
            if at * length >= begin
        )
        if at + size * world * accumulate > samples:
            break
        at += size * world * accumulate
        steps += 1

    assert found.steps(samples) == (steps, samples - at)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 0}, "context_length must be at least 1; got 0"),
        (
            {"context_length": 1},
            "context_length must be at least 2 where labels are shifted inside",
        ),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"batch_size": 0}, "batch size is 0; expected 1 to"),
        ({"batch_size": [(10, 4)]}, "begins at 10 total tokens; expected 0"),
        (
            {"batch_size": [(0, 4), (9, 8), (9, 16)]},
            "begins at 9 total tokens; expected more than 9",
        ),
        ({"factor": 20}, "factor=20 is tokens per parameter, so parameters must be given"),
        ({"factor": -1}, "must not be negative"),
        (
            {"dataset_samples": None},
            "factor=0 means the whole dataset, but this one has no end that is known",
        ),
        ({"ends": False}, "give a factor"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budget(**changes)

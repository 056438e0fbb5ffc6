"""Shares in a run's stats: of what its balances count."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.corpora import flat, write_txt
from support.served import Place, Trainer, printed
from tokenloom_server.reports.stats import RunStats
from tokenloom_tools.receipts import Receipts

SOURCES = ["txt:short.txt:text", "txt:long.txt:text"]
#: Of their rows, with end of text.
ROW_TOKENS = 11, 61


@pytest.fixture
def padded(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    for spec, tokens in zip(SOURCES, ROW_TOKENS, strict=True):
        write_txt(tmp_path / spec.split(":")[1], ["x" * (tokens - 1)] * 4_000)
    places: list[Place] = []

    def make(**fields: Any) -> Place:
        fields = {
            "sequence_length": 64,
            "packing": "none",
            "pad_id": 0,
            "window_micro_steps": 6,
        } | fields
        places.append(Place(tmp_path, tmp_path, flat(SOURCES) | fields))
        return places[-1]

    yield make
    for place in places:
        place.stop()


def shares(stats: RunStats) -> list[list[float | None]]:
    """By source: by the weights in force, as they asked so far, so far, in the last window."""
    return [
        [source.target_share, source.expected_share, source.actual_share, source.window_share]
        for source in stats.sources
    ]


def test_shares_are_of_real_tokens_where_the_run_balances_those(
    padded: Callable[..., Place],
) -> None:
    place = padded()
    served = place.serve()
    trainer = Trainer(served)
    trainer.train_to(400)
    # A longest sample off, of so many real tokens.
    half = pytest.approx(0.5, abs=64 / 7_000)
    for window in half, None:
        stats = served.stats.read()
        assert stats.count == "real"
        short, long = (
            source.samples * tokens
            for source, tokens in zip(stats.sources, ROW_TOKENS, strict=True)
        )
        assert abs(short - long) <= 64
        assert shares(stats) == [[half, half, half, window]] * 2
        assert "shares are of real tokens, without padding" in printed(stats)
        # After a restart: so far, and nothing moved.
        served = place.restart()
    trainer.connect(served)
    trainer.train_to(800)
    assert shares(served.stats.read()) == [[half] * 4] * 2


@pytest.mark.parametrize("fields", [{"count": "positions"}, {"packing": "concat"}])
def test_shares_are_of_positions_where_the_run_balances_those(
    padded: Callable[..., Place], fields: dict[str, Any]
) -> None:
    served = padded(**fields).serve()
    Trainer(served).train_to(400)
    stats = served.stats.read()
    assert stats.count == "positions"
    assert shares(stats) == [pytest.approx([0.5] * 4)] * 2
    assert "real tokens" not in printed(stats)


def under(policy: str, *children: dict[str, Any], **node: Any) -> dict[str, Any]:
    """Fields of a mixture over the sources: about 2,750 and 15,250 samples of 16 tokens."""
    named = [{"source": source, **child} for source, child in zip(SOURCES, children, strict=True)]
    return {
        "mixture": {"policy": policy, "children": named, **node},
        "sequence_length": 16,
        "packing": "concat",
    }


def of_first(stats: RunStats) -> tuple[float, float]:
    """Of the first source, the share in force and that which was expected so far."""
    return stats.sources[0].target_share, stats.sources[0].expected_share


def test_target_follows_a_schedule_and_beside_it_stands_what_was_expected_so_far(
    padded: Callable[..., Place], tmp_path: Path
) -> None:
    # Weights are made anew every 256 samples, so from sample 512 on the second ones hold.
    schedule = under(
        "schedule", {"weight": [[0, 3], [16 * 300, 1]]}, {"weight": [[0, 1]]}, interpolate="step"
    )
    place = padded(**schedule)
    served = place.serve()
    trainer = Trainer(served)
    assert of_first(served.stats.read()) == (0.75, 0)
    trainer.train_to(400)
    assert of_first(served.stats.read()) == (0.75, 0.75)
    for end in 700, 1000:
        trainer.train_to(end)
        expected = (0.75 * 512 + 0.5 * (end - 512)) / end
        stats = served.stats.read()
        assert of_first(stats) == (0.5, pytest.approx(expected, abs=1e-9))
        # A healthy run does not look broken.
        assert abs(stats.sources[0].expected_share - stats.sources[0].actual_share) <= 1 / end
        # A server that is restarted in between, and knows the boundary before the commit, counts on from there.
        served = trainer.connect(place.restart())
        target, at_boundary = of_first(served.stats.read())
        assert (target, at_boundary) == (0.5, pytest.approx(expected, abs=0.02))
    # A launch that goes on from a state, on another ledger, with other ranks; and one that goes back within the run.
    state = trainer.state(900)
    (tmp_path / "elsewhere").mkdir()
    for ledger in place.ledger_path, tmp_path / "elsewhere/ledger.db":
        place.stop()
        served = place.serve(ledger)
        Trainer(served, world_size=1, state=state).train_to(1200)
        expected = (0.75 * 512 + 0.5 * (1200 - 512)) / 1200
        assert of_first(served.stats.read()) == (0.5, pytest.approx(expected, abs=1e-9))
        assert served.companion(Receipts).report().sources[0].expected_share == pytest.approx(
            expected, abs=1e-9
        )


def test_draws_stray_from_what_is_expected_and_a_source_that_is_out_has_no_share_any_more(
    padded: Callable[..., Place],
) -> None:
    served = padded(**under("weighted", {"max_tokens": 16 * 200}, {})).serve()
    trainer = Trainer(served).train_to(300)
    stats = served.stats.read()
    assert of_first(stats) == (0.5, pytest.approx(0.5, abs=1e-8))
    assert stats.sources[0].actual_share != pytest.approx(0.5, abs=1e-3)
    taken = trainer.train_to(800).taken()
    # The draw that finds it out is the first under the new weights.
    draws = [taken[index].source for index in sorted(taken)]
    assert draws.count(0) == 200
    stats = served.stats.read()
    out_at = round(stats.sources[0].expected_share * 800 / 0.5)
    assert of_first(stats) == (0, pytest.approx(0.5 * out_at / 800, abs=1e-8))
    assert (
        draws[:out_at].count(0) == 200
        and draws.index(1, max(i for i, own in enumerate(draws) if own == 0)) <= out_at
    )


def test_a_state_of_before_counts_what_was_given_as_expected(padded: Callable[..., Place]) -> None:
    place = padded(**under("weighted", {}, {}))
    served = place.serve()
    Trainer(served).train_to(300)
    stored = place.stored().committed
    assert stored is not None and '"owed"' in stored.state
    timeline = served.coordinator.timeline
    state = timeline.decode(re.sub(r'"owed":"-?[0-9a-f]+",', "", stored.state))
    assert [source.owed for source in state.sources] == [0, 0]


def test_without_recent_commits_there_is_no_window(
    padded: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = padded().serve()
    assert {source.window_share for source in served.stats.read().sources} == {None}
    Trainer(served).train_to(400)
    assert None not in {source.window_share for source in served.stats.read().sources}
    time.sleep(0.3)
    monkeypatch.setattr("tokenloom_server.run.views.LOOK_BACK_S", 0.2)
    stats = served.stats.read()
    assert {source.window_share for source in stats.sources} == {None}
    assert stats.tokens_per_s == 0
    assert re.search(r"50\.\d+% +│ +–", printed(stats))

"""Shares in a run's stats: of what its balances count."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.corpora import flat, write_txt
from support.served import Place, Trainer
from tokenloom_server.reports.stats import RunStats
from tokenloom_server.reports.stats_text import print_stats

SOURCES = ["txt:short.txt:text", "txt:long.txt:text"]
#: Of their rows, with end of text.
ROW_TOKENS = 11, 61


@pytest.fixture
def padded(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    for spec, tokens in zip(SOURCES, ROW_TOKENS, strict=True):
        write_txt(tmp_path / spec.split(":")[1], ["x" * (tokens - 1)] * 4_000)
    places: list[Place] = []

    def make(**fields: Any) -> Place:
        fields = {"sequence_length": 64, "packing": "none", "pad_id": 0, "window_micro_steps": 6} | fields
        places.append(Place(tmp_path, tmp_path, flat(SOURCES, **fields)))
        return places[-1]

    yield make
    for place in places:
        place.stop()


def shares(stats: RunStats) -> list[list[float]]:
    """By source: as the weights ask, so far, in the last window."""
    return [[source.target_share, source.actual_share, source.window_share] for source in stats.sources]


def printed(stats: RunStats) -> str:
    out = io.StringIO()
    print_stats(Console(file=out, width=200), stats)
    return out.getvalue()


def test_shares_are_of_real_tokens_where_the_run_balances_those(padded: Callable[..., Place]) -> None:
    place = padded()
    served = place.serve()
    trainer = Trainer(served)
    trainer.train_to(400)
    # A longest sample off, of so many real tokens.
    near = pytest.approx([0.5] * 3, abs=64 / 7_000)
    for _ in range(2):
        stats = served.stats.read()
        assert stats.count == "real"
        short, long = (source.samples * tokens for source, tokens in zip(stats.sources, ROW_TOKENS, strict=True))
        assert abs(short - long) <= 64
        assert shares(stats) == [near, near]
        assert "shares are of real tokens, without padding" in printed(stats)
        # After a restart: so far, and nothing moved.
        served = place.restart()
    trainer.connect(served)
    trainer.train_to(800)
    assert shares(served.stats.read()) == [near, near]


@pytest.mark.parametrize("fields", [{"count": "positions"}, {"packing": "concat"}])
def test_shares_are_of_positions_where_the_run_balances_those(
    padded: Callable[..., Place], fields: dict[str, Any]
) -> None:
    served = padded(**fields).serve()
    Trainer(served).train_to(400)
    stats = served.stats.read()
    assert stats.count == "positions"
    assert shares(stats) == [pytest.approx([0.5] * 3)] * 2
    assert "real tokens" not in printed(stats)

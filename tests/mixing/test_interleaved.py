"""The alternative without a service, `datasets.interleave_datasets`, and what is the same here and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.features import document, order_of
from tokenloom_server.core.state import State

SHORT, LONG = 80_000, 1_000_000
WEIGHTS = (0.9, 0.1)
SIZE = 100
#: Draws until the short one has given all: a negative binomial of 80,000 successes at 0.9.
EXPECTED, DEVIATION = SHORT / WEIGHTS[0], (SHORT * (1 - WEIGHTS[0])) ** 0.5 / WEIGHTS[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("interleaved")
    for name, rows in (("short", SHORT), ("long", LONG)):
        pq.write_table(pa.table({"row": np.arange(rows), "kind": np.zeros(rows, np.int8)}), found / f"{name}.parquet")
    return found


def at_the_end(folder: Path, on_exhausted: str, long_epochs: float) -> State:
    """The same mixture here."""
    children: list[dict[str, Any]] = [
        {"source": f"parquet:{name}.parquet:*", "weight": weight, "epochs": epochs}
        for name, weight, epochs in zip(("short", "long"), WEIGHTS, (1, long_epochs), strict=True)
    ]
    order = order_of(
        folder,
        document(
            batching={"bucket_by": "kind", "columns": ["row"]},
            global_batch_size=SIZE,
            mixture={"policy": "weighted", "on_exhausted": on_exhausted, "children": children},
        ),
    )
    pipeline = order.pipeline(order.initial())
    pipeline.advance((SHORT + LONG) * 2)
    assert pipeline.ended is not None
    return pipeline.state()


def interleaved(seed: int) -> Iterator[int]:
    import datasets

    datasets.disable_progress_bars()
    both = [
        datasets.Dataset.from_dict({"source": np.full(rows, source, np.int8)})
        for source, rows in enumerate((SHORT, LONG))
    ]
    found = datasets.interleave_datasets(
        both, probabilities=list(WEIGHTS), seed=seed, stopping_strategy="first_exhausted"
    )
    yield from np.bincount(found.with_format("numpy")["source"][:], minlength=2).tolist()


def test_interleaving_ends_with_the_first_that_is_exhausted_at_88_900_samples() -> None:
    short, long = interleaved(seed=0)
    assert short in (SHORT, SHORT - 1)
    # So 99 % of the long one was never read.
    assert abs(short + long - EXPECTED) <= 5 * DEVIATION
    assert 88_000 < EXPECTED < 89_000


def test_on_exhausted_stop_ends_there_too(folder: Path) -> None:
    state = at_the_end(folder, "stop", 1)
    short, long = state.sources
    assert short.samples == SHORT
    # Draws are of whole batches, so there are fewer of them, and each is a hundred samples.
    assert abs(short.samples + long.samples - EXPECTED) <= 5 * DEVIATION * SIZE**0.5


def test_on_exhausted_drop_gives_every_row_of_both_once(folder: Path) -> None:
    # A twentieth of the long one is enough to see it.
    state = at_the_end(folder, "drop", 0.05)
    assert [source.samples for source in state.sources] == [SHORT, LONG // 20]
    assert [source.row_counts.lost_tokens for source in state.sources] == [0, 0]

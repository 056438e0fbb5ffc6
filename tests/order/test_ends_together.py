"""``balance_remaining`` ends together, however long the rows of a source are from its first to its last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import corpora
from tokenloom_server.core.size_estimate import SizeEstimate
from tokenloom_server.core.state import State
from tokenloom_server.mixing.totals import SourceTotal
from tokenloom_server.order import builder, size_estimates
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.record import estimates_from_json, estimates_to_json
from tokenloom_server.planning.forecast import Part, forecast

LENGTH = 16
#: Samples between the last of the first source that ends and the end of the run, where sources are read whole.
TOGETHER = 16
#: And where a few places of each were looked at.
NEARLY = 256


def lengths(shape: str, rows: int, seed: int) -> npt.NDArray[np.int64]:
    at, rng = np.arange(rows), np.random.default_rng(seed)
    match shape:
        case "rising":
            return 4 + 36 * at // rows
        case "falling":
            return (4 + 36 * at // rows)[::-1]
        case "up":
            return np.where(at < 2 * rows // 3, 4, 40)
        case "down":
            return np.where(at < 2 * rows // 3, 40, 4)
        case "heavy":
            return np.minimum(2000, rng.pareto(1.3, rows) * 8 + 1).astype(np.int64)
        case "flat":
            return np.full(rows, 20)
    return rng.integers(1, 40, rows)


def write(path: Path, of: npt.NDArray[np.int64], group: int = 1000) -> None:
    ends = np.concatenate(([0], np.cumsum(of))).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.full(ends[-1], 7, np.uint16)))
    pq.write_table(pa.table({"ids": ids}), path, row_group_size=group)


def order_of(
    folder: Path, shapes: Sequence[str], rows: Sequence[int], seed: int, policy: str = "balance_remaining", **of: Any
) -> PipelineFactory:
    children = []
    for i, (shape, count) in enumerate(zip(shapes, rows, strict=True)):
        write(folder / f"{i}.parquet", lengths(shape, count, seed + i))
        children.append({"source": f"parquet:{i}.parquet:ids", "alias": shape, **of})
    mixture = {"policy": policy, "children": children}
    return corpora.order_of(folder, corpora.mixture(mixture=mixture, sequence_length=LENGTH, seed=seed))


def gone_through(order: PipelineFactory, step: int) -> list[State]:
    pipeline, states = order.pipeline(order.initial()), [order.initial()]
    while pipeline.ended is None:
        pipeline.advance(step)
        states.append(pipeline.state())
    return states


def apart(states: Sequence[State]) -> int:
    """Samples between the first source's last one and the last source's."""
    end = [source.samples for source in states[-1].sources]
    lasts = [
        next(after.sample_index for after in states if after.sources[i].samples == count) for i, count in enumerate(end)
    ]
    return max(lasts) - min(lasts)


def last_quarter(states: Sequence[State]) -> npt.NDArray[np.float64]:
    """Each source's share of the last quarter, by its share of the run."""
    end = states[-1]
    begin = next(state for state in states if state.sample_index >= 3 * end.sample_index // 4)
    given = np.array([[source.samples for source in state.sources] for state in (begin, end)])
    return (given[1] - given[0]) / (end.sample_index - begin.sample_index) / (given[1] / end.sample_index)


MIXES = [
    (["flat", "rising"], [30_000, 30_000]),
    (["flat", "falling"], [30_000, 30_000]),
    (["rising", "falling", "up", "down", "random", "flat"], [9_000, 8_000, 10_000, 9_000, 12_000, 7_000]),
    (["heavy", "rising", "random"], [9_000, 30_000, 12_000]),
]


@pytest.mark.parametrize(("shapes", "rows"), MIXES, ids=lambda value: "-".join(map(str, value)))
@pytest.mark.parametrize("seed", [1, 2])
def test_sources_that_are_read_whole_end_together(
    tmp_path: Path, shapes: list[str], rows: list[int], seed: int
) -> None:
    order = order_of(tmp_path, shapes, rows, seed)
    states = gone_through(order, 4)
    print("APART", shapes, seed, apart(states), last_quarter(states).round(3), states[-1].sample_index)
    assert apart(states) <= TOGETHER
    assert last_quarter(states) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("shapes", "rows"), MIXES, ids=lambda value: "-".join(map(str, value)))
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("whole", [1<<14, 1<<17])
def test_sources_of_which_a_part_is_read_end_nearly_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes: list[str], rows: list[int], seed: int, whole: int
) -> None:
    # Of each stratum a few hundred tokens, of a mebibyte.
    monkeypatch.setattr(size_estimates, "READ_BYTES", whole)
    monkeypatch.setattr(size_estimates, "ENCODED_BYTES", whole)
    order = order_of(tmp_path, shapes, rows, seed)
    states = gone_through(order, 4)
    print("APART", whole, shapes, seed, apart(states), last_quarter(states).round(3), states[-1].sample_index, [round(e.tokens/s.tokens,3) for e,s in zip(order.record.size_estimates.values(), states[-1].sources)])

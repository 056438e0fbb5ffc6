"""A run that counts real tokens: padding is no part of a balance."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pytest
from support.corpora import (
    advanced,
    flat,
    order_of,
    parsed,
    random_tree,
    reread,
    write_txt,
)
from support.mixing import node
from tokenloom_server.core.state import State
from tokenloom_server.errors import ConfigError
from tokenloom_server.order import builder, snapshot
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline

SHORT, LONG, MIXED = (f"txt:{name}.txt:text" for name in ("short", "long", "mixed"))
LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 11 tokens, of 61, and of 1 to 64, with their end of text."""
    path = tmp_path_factory.mktemp("lengths")
    write_txt(path / "short.txt", ["s" * 10] * 400)
    write_txt(path / "long.txt", ["l" * 60] * 400)
    write_txt(path / "mixed.txt", ["m" * (row * 37 % 64) for row in range(400)])
    return path


def document(
    packing: str, *children: dict[str, Any], policy: str = "least_consumed", **fields: Any
) -> dict[str, Any]:
    root = node(policy, *list(children or ({"source": SHORT}, {"source": LONG})))
    return flat([], packing=packing, sequence_length=LENGTH, **fields) | {"mixture": root}


def states(order: PipelineFactory, samples: int) -> list[State]:
    """Those before each sample, and after the last."""
    pipeline, found = order.pipeline(order.initial()), [order.initial()]
    while len(found) <= samples and pipeline.ended is None:
        pipeline.advance(1)
        found.append(pipeline.state())
    return found


def test_at_equal_weights_real_tokens_are_equal_where_positions_gave_550_and_3050(
    folder: Path,
) -> None:
    positions = order_of(folder, document("none", count="positions"))
    assert [source.real_tokens for source in states(positions, 100)[-1].sources] == [550, 3050]
    for packing in ("none", "best_fit"):
        for state in states(
            order_of(folder, document(packing, *({"source": of} for of in (SHORT, LONG, MIXED)))),
            150,
        ):
            tokens = [source.real_tokens for source in state.sources]
            assert max(tokens) - min(tokens) <= LENGTH


@pytest.mark.parametrize(
    ("policy", "packing"),
    [
        *(("least_consumed", packing) for packing in ("none", "best_fit")),
        *(("soft_sequential", "none"), ("balance_remaining", "best_fit"), ("schedule", "none")),
    ],
)
def test_a_run_goes_on_identically_from_every_sample_index(
    folder: Path, policy: str, packing: str
) -> None:
    inner = node(policy, {"source": SHORT}, {"source": MIXED, "epochs": 0.25})
    order = order_of(folder, document(packing, {"source": LONG}, inner, policy=policy))
    # Weights that follow the run are made anew before sample 256.
    whole = states(order, 280)
    for state, later in zip(whole, whole[5:], strict=False):
        assert advanced(order, reread(order, state), 5) == later


@pytest.mark.parametrize("count", ["real", "positions"])
def test_a_record_says_what_a_run_counts_and_a_file_that_says_otherwise_is_refused(
    folder: Path, count: str
) -> None:
    record = order_of(folder, document("none", count=count)).record.to_json()
    assert json.loads(record)["config"].get("count", "positions") == count
    same, other = (
        document("none", count=each)
        for each in ("real", "positions")[:: 1 if count == "real" else -1]
    )
    assert builder.load(parsed(same), folder, None, record).record.to_json() == record
    with pytest.raises(
        ConfigError, match=f'count: the run began with "{count}", the file has "{other["count"]}"'
    ):
        builder.load(parsed(other), folder, None, record)


@pytest.mark.parametrize("count", ["real", "positions"])
def test_where_documents_are_joined_a_file_may_say_either_count(folder: Path, count: str) -> None:
    order = order_of(folder, document("concat", count=count))
    record, state = (
        order.record.to_json(),
        Timeline(order).encode(advanced(order, order.initial(), 5), 1),
    )
    text = snapshot.compose(order.record.template("a", "train", 1), state, state)
    for other in ("real", "positions"):
        assert (
            builder.load(
                parsed(document("concat", count=other)), folder, None, record
            ).record.to_json()
            == record
        )
        # And where the run's ledger is gone.
        anew = order_of(folder, document("concat", count=other))
        point = snapshot.parse(
            text, anew.record.template("b", "train", 1), Timeline(anew).shape_at, anew.config
        )
        assert (point.sample_index, point.changed) == (5, ())


@pytest.mark.parametrize("seed", range(6))
def test_what_is_worked_out_ahead_is_what_a_state_goes_on_with(tmp_path: Path, seed: int) -> None:
    """The choices of a run, and those of a pipeline that is made anew at each of its states, over a random tree."""
    rng = random.Random(seed)

    def specs() -> Iterator[str]:
        for name in numbers():
            lengths = [rng.randint(1, rng.choice([3, 9])) for _ in range(rng.randint(5, 120))]
            write_txt(tmp_path / f"{name}.txt", ["x" * length for length in lengths])
            yield f"txt:{name}.txt:text"

    fields = {"packing": rng.choice(["none", "best_fit"]), "sequence_length": 8}
    order = order_of(tmp_path, flat([], **fields) | {"mixture": random_tree(rng, 4, specs())})
    ahead, state = order.pipeline(order.initial()), order.initial()
    while ahead.ended is None:
        samples = rng.choice([1, 2, 7, 60, 300])
        ahead.advance(samples)
        state = advanced(order, reread(order, state), samples)
        assert ahead.state() == state

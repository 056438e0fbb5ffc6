"""The canonical order: the same samples from any state, on any ranks, over four schemes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.corpora import (
    CODE,
    DOCS,
    PROSE,
    ROWS,
    WIKI,
    advanced,
    flat,
    mixture,
    order_of,
    reread,
    write_corpus,
)
from support.golden_rows import GOLDEN_ROWS, write_golden_rows
from support.mixing import node
from support.ray_cluster import ray_cluster
from tokenloom_server.core.hashing import slice_rotation
from tokenloom_server.core.state import (
    ORDER_VERSION,
    SHARE_UNIT,
    Cursor,
    EpochCursor,
    FileCursor,
    PackedCursor,
    SourceState,
    State,
    WindowCursor,
)
from tokenloom_server.mixing.policy import MAX_SUM
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.workers.cluster.connection import Needs
from tokenloom_server.workers.cluster.readers.link import RayReaders, ReaderOptions

GOLDEN = Path(__file__).parents[1] / "golden"
END_OF_TEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden_rows(write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster({"num_cpus": 4}) as started:
        yield started


class Sample(NamedTuple):
    source: int
    ids: bytes
    starts: tuple[int, ...]


class Step(NamedTuple):
    """What all ranks get in one step, in the order of the samples, and the state behind it."""

    samples: tuple[Sample, ...]
    state: State


def groups(
    order: PipelineFactory,
    state: State,
    world_size: int = 1,
    batch_size: int = 1,
    group_micro_steps: int = 5,
    burst: int = 3,
) -> Iterator[StepGroup]:
    """The groups from a state to the end of data."""
    pipeline = order.pipeline(state)
    plan = BatchPlan(
        start_index=state.sample_index,
        world_size=world_size,
        batch_size=batch_size,
        group_micro_steps=group_micro_steps,
    )
    while pipeline.ended is None:
        group = pipeline.begin_group(plan)
        while len(group.marks) < group_micro_steps and pipeline.ended is None:
            pipeline.fill(group, burst)
        yield group


def steps(order: PipelineFactory, state: State, **plan: int) -> Iterator[Step]:
    """Steps as a client sees them: each rank's slice put back to where it says that it belongs."""
    for group in groups(order, state, **plan):
        world_size, batch_size = group.plan.world_size, group.plan.batch_size
        for step in range(len(group.marks)):
            places: list[Sample | None] = [None] * (world_size * batch_size)
            for rank in range(world_size):
                counts, starts = group.document_starts(rank, step, step + 1)
                at = group.slice_of(step, rank) * batch_size
                done = 0
                for place in range(batch_size):
                    mine = tuple(starts[done : done + counts[place]].tolist())
                    done += counts[place]
                    source = int(group.source_ids[rank, step, place])
                    assert places[at + place] is None
                    places[at + place] = Sample(
                        source, group.ids(rank, step, step + 1)[place].tobytes(), mine
                    )
            assert None not in places
            yield Step(
                tuple(sample for sample in places if sample is not None), group.state_after(step)
            )


def whole(order: PipelineFactory) -> list[Step]:
    return list(steps(order, order.initial()))


CONFIGS: dict[str, dict[str, Any]] = {
    "nested": mixture(),
    "nested, shifted": mixture(labels="shifted", sequence_length=6),
    "stops": mixture(mixture=mixture()["mixture"] | {"on_exhausted": "stop"}),
    "weighted, begins marked": mixture(
        mixture=mixture()["mixture"] | {"policy": "weighted"}, add_bos=True
    ),
    "long samples, a part of an epoch": flat([DOCS, WIKI], sequence_length=20, seed=3)
    | {
        "mixture": node(
            "least_consumed", {"source": DOCS, "epochs": 2.3}, {"source": WIKI, "weight": 3}
        )
    },
}


def _shuffled(**fields: Any) -> dict[str, Any]:
    """A mixture over all schemes and every way to shuffle, with parts of epochs."""
    return mixture(
        mixture=node(
            "least_consumed",
            {"source": CODE, "shuffle": "rows", "shuffle_window_rows": 5},
            {"source": DOCS, "epochs": 2.4, "lanes": 2},
            {"source": PROSE, "shuffle": "shards", "epochs": 2},
            {
                "source": WIKI,
                "shuffle": "rows",
                "shuffle_window_rows": 4,
                "epochs": 1.5,
                "weight": 2,
            },
        ),
        **fields,
    )


PACKED: dict[str, dict[str, Any]] = {
    "best fit": mixture(packing="best_fit", sequence_length=16, pack_window_rows=7),
    "best fit, shuffled, shifted, padded on the left": _shuffled(
        packing="best_fit",
        sequence_length=24,
        pack_window_tokens=90,
        labels="shifted",
        padding="left",
        pad_id=257,
    ),
    "none": mixture(packing="none", sequence_length=16, pad_id=3),
    "none, shuffled, shifted, split, padded on the left": _shuffled(
        packing="none", sequence_length=20, long_rows="split", labels="shifted", padding="left"
    ),
    "joined, tails padded": _shuffled(tail="pad", sequence_length=16, pad_id=257),
    "joined, tails padded, shifted": mixture(
        tail="pad", sequence_length=12, labels="shifted", mask_boundaries=True
    ),
}
CONFIGS |= PACKED


@pytest.mark.parametrize("name", CONFIGS)
def test_the_rest_from_every_sample_equals_the_uninterrupted_run_twice_in_a_row(
    folder: Path, name: str
) -> None:
    order = order_of(folder, CONFIGS[name])
    uninterrupted = whole(order)
    assert len(uninterrupted) > 20
    for k in range(len(uninterrupted) + 1):
        state = uninterrupted[k - 1].state if k else order.initial()
        # The state as it travels and rests.
        again = reread(order, state)
        assert again == state
        rest = steps(order, again, group_micro_steps=1 + k % 7, burst=1 + k % 4)
        if k % 30 and k < len(uninterrupted) - 3:
            # Two steps and the states behind them: what follows an equal state is compared where that stood.
            ahead = [next(rest), next(rest)]
            assert ahead == uninterrupted[k : k + 2]
            if k % 7 == 0:
                # From there once more: what works once may break the second time.
                again = reread(order, ahead[-1].state)
                assert next(steps(order, again, group_micro_steps=3)) == uninterrupted[k + 2]
        else:
            assert list(rest) == uninterrupted[k:]


def test_a_run_covers_every_edge_that_resuming_can_meet(folder: Path) -> None:
    # What the test above is worth.
    order = order_of(folder)
    states = [step.state for step in whole(order)]
    docs = [state.sources[1] for state in states]
    assert {source.epoch for source in docs} == {0, 1}
    assert any(source.exhausted for source in docs)
    assert not states[len(states) // 2].sources[0].exhausted
    code = [state.sources[0].cursor for state in states]
    assert {cursor.shard for cursor in code} == {0, 1}
    assert any(cursor.tokens for cursor in code)
    assert any(not cursor.tokens for cursor in code)


def rows_of(order: PipelineFactory, source: int) -> list[int]:
    """A source's tokens, by the definition: every row of every shard with the end of text behind it."""
    config = order.config.sources[source]
    documents = [
        ids
        for shard in ROWS[config.source]
        for row in shard
        if (ids := list(row.encode()) if isinstance(row, str) else list(row or ()))
    ]
    assert math.floor(config.epochs) == config.epochs
    return [token for ids in documents * int(config.epochs) for token in [*ids, END_OF_TEXT]]


@pytest.mark.parametrize("name", PACKED)
def test_what_a_tally_counts_is_what_the_samples_have(folder: Path, name: str) -> None:
    order = order_of(folder, PACKED[name])
    padding, unfilled, run = Counter[int](), 0, whole(order)
    for step in run:
        for sample in step.samples:
            assert len(sample.ids) == order.form.sample_bytes
            left = order.form.width - len(order.form.ids(sample.ids))
            unfilled += left
            # Of L + 1 ids the last one is no input: with padding on the right it does not count.
            padding[sample.source] += (
                min(left, order.form.length)
                if order.form.padding == "left"
                else max(0, left - (order.form.width - order.form.length))
            )
        sources = step.state.sources
        assert [source.row_counts.padding_tokens for source in sources] == [
            padding[i] for i in range(len(sources))
        ]
        assert step.state.total_tokens == step.state.sample_index * order.config.sequence_length
    assert sum(padding.values()) > 0
    if order.config.packing != "concat":
        # All that is read is there, or counted as lost.
        lost = sum(source.row_counts.lost_tokens for source in run[-1].state.sources)
        given = run[-1].state.sample_index * order.form.width - unfilled + lost
        specs = [source.source for source in order.config.sources]
        if all(order.config.epochs[i] in (1.0, 2.0) for i in range(len(specs))):
            assert given == sum(len(rows_of(order, i)) for i in range(len(specs)))


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (2, 1), (3, 4), (4, 2), (5, 3)])
def test_slices_are_rotated_by_the_hash_of_where_the_step_begins(
    folder: Path, world_size: int, batch_size: int
) -> None:
    order = order_of(folder)
    seen = set()
    for group in groups(order, order.initial(), world_size, batch_size):
        for step in range(len(group.marks)):
            rotation = slice_rotation(7, group.step_begin(step), world_size)
            slices = [group.slice_of(step, rank) for rank in range(world_size)]
            assert slices == [(rank + rotation) % world_size for rank in range(world_size)]
            seen.add(rotation)
    assert seen == set(range(world_size))


def test_data_that_end_with_a_step_end_with_the_next_one(folder: Path) -> None:
    order = order_of(folder)
    total = len(whole(order))
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=1, batch_size=total, group_micro_steps=2)
    )
    pipeline.fill(group, 1)
    assert (len(group.marks), pipeline.ended) == (1, None)
    pipeline.fill(group, 1)
    assert (len(group.marks), pipeline.ended, pipeline.dropped_samples) == (
        1,
        "every source is exhausted",
        0,
    )


def test_the_reason_names_the_source_that_stopped_its_node(folder: Path) -> None:
    order = order_of(folder, CONFIGS["stops"])
    pipeline = order.pipeline(order.initial())
    pipeline.advance(10**6)
    assert pipeline.ended == "exhausted, and its node stops: docs"


def test_document_starts_are_told_while_the_producer_adds_a_step(folder: Path) -> None:
    class Growing(list[int]):
        """The producer appends whenever somebody looks how many there are."""

        def __len__(self) -> int:
            self.append(0)
            return super().__len__()

    order = order_of(folder)
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=3, batch_size=2, group_micro_steps=9)
    )
    pipeline.fill(group, 4)
    counts, starts = group.document_starts(1, 0, 4)
    assert sum(counts)
    group.rotations = Growing(group.rotations)
    found, positions = group.document_starts(1, 0, 4)
    assert (found, positions.tolist()) == (counts, starts.tolist())


GOLDEN_CONFIGS = CONFIGS | {
    **GOLDEN_ROWS,
    "all four, equal weights": flat([CODE, DOCS, PROSE, WIKI]),
    "all four, drawn": flat([CODE, DOCS, PROSE, WIKI], "weighted", seed=2**63 - 1),
    "rows that end themselves": flat(
        [CODE, PROSE], add_eot="auto", end_of_text_id=32, sequence_length=32
    ),
    "what is left decides": mixture(sequence_length=2)
    | {
        "mixture": node(
            "balance_remaining",
            {"source": CODE},
            node("soft_sequential", {"source": DOCS}, {"source": PROSE}, epochs=2),
            {"source": WIKI, "max_tokens": 500},
        )
    },
    "a schedule": mixture(sequence_length=2)
    | {
        "mixture": node(
            "schedule",
            {"source": CODE, "weight": [[0, 3], [1000, 0.5]]},
            {"source": DOCS, "weight": [[400, 0], [1200, 2]], "epochs": 3},
            node(
                "schedule",
                {"source": PROSE, "weight": [[0, 1], [600, 0]], "on_exhausted": "stop"},
                {"source": WIKI, "weight": [[0, 0], [600, 1]]},
                interpolate="step",
            ),
        )
    },
    "ids without a tokeniser": {
        **{key: value for key, value in flat([CODE, WIKI]).items() if key != "tokenizer"},
        "vocab_size": 70_000,
        "end_of_text_id": 69_999,
        "begin_of_text_id": 1,
        "add_bos": True,
    },
}


def place(cursor: Cursor | None) -> tuple[int, int, int, int]:
    """Epoch, shard or window, row, and tokens of it or samples of the rows packed from there on."""
    match cursor:
        case FileCursor(epoch, part, row, count) | WindowCursor(epoch, part, row, count):
            return epoch, part, row, count
        case PackedCursor(first, samples):
            return (*place(first)[:3], samples)
        case EpochCursor(epoch, rows):
            return epoch, 0, rows, 0
    return 0, 0, 0, 0


def values(state: State) -> list[Any]:
    """All values of a state; of those that came later only what is there: a child's weight and total that a policy
    made, and a source's bad and filtered rows."""
    position = [state.sample_index, state.total_tokens, state.digest]
    left_out = [source.row_counts[:2] for source in state.sources]
    sources = [
        (place(source.cursor), *dataclasses.astuple(source)[1:6], *(counts if any(counts) else ()))
        for source, counts in zip(state.sources, left_out, strict=True)
    ]
    nodes = [[dataclasses.astuple(child) for child in node] for node in state.nodes]
    return [
        *position,
        sources,
        [[child[:4] if child[4:] == (0, 0) else child for child in node] for node in nodes],
    ]


def fingerprint(order: PipelineFactory) -> dict[str, Any]:
    """An order in a few values: its length, its digest, and a hash of every sample and cursor."""
    hashed = hashlib.sha256()
    step = None
    for number, step in enumerate(
        steps(order, order.initial(), world_size=2, batch_size=1), start=1
    ):
        for sample in step.samples:
            hashed.update(f"{sample.source} {sample.ids.hex()} {sample.starts}\n".encode())
        if number % 5 == 0:
            hashed.update(json.dumps(values(step.state)).encode())
    return {
        "samples": step.state.sample_index,
        "digest": f"{step.state.digest:032x}",
        "sha256": hashed.hexdigest(),
    }


def golden_orders() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"order_v{ORDER_VERSION}.json").read_text())
    return found


def test_the_order_is_what_it_was(folder: Path) -> None:
    # The values in the file: {name: fingerprint(...)} of GOLDEN_CONFIGS, as computed here.
    # When this fails, ORDER_VERSION must change (and the file of the new version be written beside the old):
    # a run that was begun by an earlier release would go on with other samples, or refuse its own checkpoints.
    orders = {name: order_of(folder, document) for name, document in GOLDEN_CONFIGS.items()}
    assert {name: fingerprint(order) for name, order in orders.items()} == golden_orders()


@pytest.mark.parametrize("readers", [1, 4])
def test_the_order_is_what_it_was_with_readers(cluster: Any, folder: Path, readers: int) -> None:
    asked = RayReaders(ReaderOptions(address=cluster.address, needs=Needs(cpus=4 / readers)))
    try:
        orders = {name: order_of(folder, document) for name, document in GOLDEN_CONFIGS.items()}
        for order in orders.values():
            order.resources.readers = asked
            order.pipeline = partial(order.pipeline, ahead=True)  # type: ignore[method-assign]
        actual = {name: fingerprint(order) for name, order in orders.items()}
        answers = sum(
            node.answers for order in orders.values() for node in asked.stats(order.resources).nodes
        )
    finally:
        asked.close()
    assert answers >= len(orders)
    assert actual == golden_orders()


def test_the_corpus_is_what_it_was() -> None:
    # The golden orders stand on it.
    text = json.dumps(ROWS, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "e910378123f000c5e9d286bb6cb59fc9d66cfce510c96e1ba9ce18ad2a4aa880"
    )


def test_a_source_that_was_never_picked_is_untouched(folder: Path) -> None:
    document = flat([CODE, WIKI], "weighted")
    document["mixture"]["children"][1]["weight"] = 1e-9
    order = order_of(folder, document)
    # It is owed a part of the tokens, by the least weight that there is, and nothing is decided by that.
    untouched = advanced(order, order.initial(), 20).sources[1]
    assert untouched == SourceState(owed=untouched.owed)
    assert untouched.owed * MAX_SUM == 20 * order.config.sequence_length * SHARE_UNIT

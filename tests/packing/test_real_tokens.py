"""How many tokens and labels a step has, counted anew from the tensors that all its ranks get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.corpora import CODE, DOCS, PROSE, WIKI, advanced, flat, numbers, order_of, write_corpus
from support.messages import PACKINGS, layout_of, message_of
from tokenloom.batch.layout import IGNORED, Batch
from tokenloom.batch.tensors import TensorMaker
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import PADDING, BatchPlan

WORLD, BATCH, GROUP = 3, 2, 4
FIM = {"fim": {"rate": 0.5, "ids": {"prefix": 1, "suffix": 2, "middle": 3}}}
MASKED = "parquet:data/masked.parquet:ids"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    lengths = numbers(60, 77, 0, 50)
    table = {
        "ids": pa.array(
            [numbers(n, i, 0, 256) for i, n in enumerate(lengths)], pa.list_(pa.int32())
        ),
        "mask": pa.array(
            [numbers(n, 500 + i, 0, 2) for i, n in enumerate(lengths)], pa.list_(pa.int8())
        ),
    }
    pq.write_table(pa.table(table), folder / "data/masked.parquet")
    return folder


def steps(order: PipelineFactory, pipeline: Pipeline | None = None) -> Iterator[list[Batch]]:
    """The batches of all ranks, step by step, from what each rank's stream carries. Groups are filled in bursts."""
    layout = layout_of(order, BATCH, "attention_mask")
    pipeline = pipeline or order.pipeline(order.initial())
    maker = TensorMaker(layout)
    plan = BatchPlan(
        start_index=pipeline.sample_index,
        world_size=WORLD,
        batch_size=BATCH,
        group_micro_steps=GROUP,
    )
    while pipeline.ended is None:
        group = pipeline.begin_group(plan)
        for burst in (1, 2, 1):
            pipeline.fill(group, burst)
        count = len(group.marks)
        messages = [message_of(layout, group, rank) for rank in range(WORLD if count else 0)]
        for step in range(count):
            yield [cast("Batch", maker.batch(message, step)) for message in messages]


def said(batch: Batch) -> tuple[int, int]:
    return batch["global_tokens"], batch["global_label_tokens"]


def recount(order: PipelineFactory, batches: list[Batch]) -> tuple[int, int]:
    """From the tensors alone."""
    first = 1 if order.config.labels == "same" else 0
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    return tokens, sum(int((batch["labels"][:, first:] != IGNORED).sum()) for batch in batches)


@pytest.mark.parametrize(("boundaries", "last_micro_step"), [(False, "pad"), (True, "drop")])
@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.parametrize("name", PACKINGS)
def test_each_step_says_what_its_ranks_tensors_have(
    folder: Path, name: str, labels: str, boundaries: bool, last_micro_step: str
) -> None:
    sources = [CODE, DOCS, PROSE, WIKI]
    masked = not name.startswith("concat")
    document = flat(
        [*sources, MASKED] if masked else sources, labels=labels, sequence_length=24, pad_id=0
    )
    document |= {"last_micro_step": last_micro_step, "mask_boundaries": boundaries} | PACKINGS[name]
    if masked:
        document["mixture"]["children"][-1]["loss_mask"] = "mask"
    order = order_of(folder, document)
    full = WORLD * BATCH * order.config.sequence_length
    seen, samples = [], 0
    for batches in steps(order):
        samples += sum(int((batch["source_ids"] != PADDING).sum()) for batch in batches)
        assert {said(batch) for batch in batches} == {recount(order, batches)}
        seen.append(batches)
        assert {batch["real_tokens"] for batch in batches} == {
            sum(own[0]["global_tokens"] for own in seen)
        }
    assert len(seen) > 8
    # (The samples of some of these fill their last step.)
    has_padding = any(PADDING in batch["source_ids"] for batch in seen[-1])
    assert has_padding == (last_micro_step == "pad" and samples % (WORLD * BATCH) > 0)
    assert (seen[0][0]["global_tokens"] == full) == name.startswith("concat")


@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.parametrize(
    "fields",
    [FIM, {"lanes": 3}],
    ids=["fim", "lanes"],
)
def test_boundaries_are_counted_where_rows_are_rearranged_or_read_in_turn(
    folder: Path, labels: str, fields: dict[str, Any]
) -> None:
    document = flat(
        [CODE, PROSE], labels=labels, sequence_length=24, mask_boundaries=True, tail="pad", pad_id=0
    )
    for child in document["mixture"]["children"]:
        child |= fields
    order = order_of(folder, document)
    state, crossings = order.initial(), 0
    for number, batches in enumerate(steps(order)):
        tokens, label_tokens = recount(order, batches)
        assert {said(batch) for batch in batches} == {(tokens, label_tokens)}
        crossings += tokens - label_tokens
        if number == 1:
            # From a state in the midst, where blocks begin elsewhere.
            state = advanced(order, state, batches[0]["sample_index"])
    assert crossings > 20
    for batches in steps(order, order.pipeline(state)):
        assert said(batches[0]) == recount(order, batches)


def test_samples_that_are_always_full_are_not_looked_at(folder: Path) -> None:
    order = order_of(folder, flat([CODE, WIKI], labels="shifted"))
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=WORLD, batch_size=BATCH, group_micro_steps=GROUP)
    )
    pipeline.fill(group, GROUP)

    assert not group.real.varies and group.counts == []
    assert [group.real_tokens(step) for step in range(GROUP)] == [(WORLD * BATCH * 8,) * 2] * GROUP

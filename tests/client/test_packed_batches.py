"""What a trainer gets of packed samples: labels, masks and positions, and attention that stays within documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.corpora import CODE, DOCS, WIKI, flat, order_of, write_corpus
from support.messages import PACKINGS, layout_of, message_of, step_numbers
from tokenloom.batch.layout import IGNORED, OPTIONAL_COLUMNS, Batch, Layout
from tokenloom.batch.packed import Message
from tokenloom.batch.tensors import TensorMaker
from tokenloom_proto.errors import ProtocolError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import PADDING, BatchPlan
from tokenloom_server.packing.tokenized_rows import DocumentSpan
from torch.nn.functional import scaled_dot_product_attention

BATCH = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def batches(
    order: PipelineFactory, *asked: str
) -> Iterator[tuple[Batch, list[list[DocumentSpan]]]]:
    """The batches of a run on one rank, and what each sample is made of; nothing for one of padding."""
    state, layout = order.initial(), layout_of(order, BATCH, *asked)
    parts = {i: order.spans(i, source, 10_000) for i, source in enumerate(state.sources)}
    pipeline, maker = order.pipeline(state), TensorMaker(layout)
    plan = BatchPlan(start_index=0, world_size=1, batch_size=BATCH, group_micro_steps=2)
    while pipeline.ended is None:
        group = pipeline.begin_group(plan)
        pipeline.fill(group, 2)
        count = len(group.marks)
        if not count:
            return
        message = message_of(layout, group)
        for step in range(count):
            batch = cast("Batch", maker.batch(message, step))
            yield (
                batch,
                [next(parts[i]) if i != PADDING else [] for i in batch["source_ids"].tolist()],
            )


def order(folder: Path, name: str, labels: str, **fields: Any) -> PipelineFactory:
    document = flat(
        [CODE, DOCS, WIKI], labels=labels, sequence_length=24, last_micro_step="pad", pad_id=0
    )
    return order_of(folder, document | PACKINGS[name] | fields)


@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.parametrize("name", PACKINGS)
def test_attention_over_packed_documents_is_that_over_each_alone(
    folder: Path, name: str, labels: str
) -> None:
    made = torch.Generator().manual_seed(1)
    tokens, places = (
        torch.randn(rows, 8, generator=made, dtype=torch.float64) for rows in (258, 64)
    )
    weights = torch.randn(3, 8, 8, generator=made, dtype=torch.float64)

    def heads(ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        return [(tokens[ids] + places[positions]) @ weight for weight in weights]

    def alone(ids: torch.Tensor) -> torch.Tensor:
        query, key, value = (each[None, None] for each in heads(ids, torch.arange(len(ids))))
        return scaled_dot_product_attention(query, key, value, is_causal=True)[0, 0]

    found = order(folder, name, labels)
    length, seen = found.config.sequence_length, 0
    for batch, parts in batches(found, *OPTIONAL_COLUMNS):
        numbers, filled = batch["document_ids"], batch["attention_mask"].bool()
        assert torch.equal(numbers >= 0, filled)
        same = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(
            length, length
        ).tril().bool()
        query, key, value = (
            each[:, None] for each in heads(batch["input_ids"], batch["position_ids"])
        )
        packed = scaled_dot_product_attention(query, key, value, attn_mask=same[:, None])[:, 0]
        # What a kernel for variable lengths computes: each stretch of the flat batch by itself.
        edges = batch["cu_seqlens"]
        assert edges.dtype == torch.int32 and edges[0] == 0 and edges[-1] == BATCH * length
        assert batch["max_seqlen"] == int(edges.diff().max())
        flat_ids = batch["input_ids"].reshape(-1)
        varlen = torch.cat(
            [
                alone(flat_ids[a:b])
                for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            ]
        )
        for i, own in enumerate(parts):
            ids = np.concatenate([part.ids for part in own]) if own else np.empty(0)
            at = found.form.begin(len(ids)) if own else 0
            for part in own:
                # What lies in the last id of a shifted sample is only a label.
                document = torch.from_numpy(part.ids.astype(np.int64))[: length - at]
                segment = slice(at, at + len(document))
                assert torch.equal(batch["input_ids"][i, segment], document)
                if len(document):
                    expected = alone(document)
                    torch.testing.assert_close(packed[i, segment], expected)
                    torch.testing.assert_close(
                        varlen.reshape(BATCH, length, -1)[i, segment], expected
                    )
                    seen += 1
                at += len(part.ids)
        if seen > 40:
            return
    pytest.fail(f"{seen} documents are too few")


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.parametrize("name", PACKINGS)
def test_a_label_is_the_token_that_the_model_is_to_predict_there(
    folder: Path, name: str, labels: str, masks: bool
) -> None:
    found = order(folder, name, labels, mask_boundaries=masks)
    length, shifted = found.config.sequence_length, labels == "shifted"
    crossings = 0
    for batch, parts in batches(found, *OPTIONAL_COLUMNS):
        assert torch.equal(batch["loss_mask"].bool(), batch["labels"] != IGNORED)
        for i, own in enumerate(parts):
            # By definition: the ids of the sample, and for each the document that it is of.
            ids = [
                (token, number) for number, part in enumerate(own) for token in part.ids.tolist()
            ]
            padding = [(0, -1)] * (found.form.width - len(ids))
            ids = [*padding, *ids] if found.form.padding == "left" else [*ids, *padding]
            begins = {number: part.begin for number, part in enumerate(own)}
            expected = []
            for at in range(length):
                target, before = ids[at + shifted], ids[at + shifted - 1] if at + shifted else None
                crossing = before is not None and before[1] != target[1]
                counts = target[1] >= 0 and not (crossing and before is not None and before[1] < 0)
                if masks and crossing and counts:
                    # (A stretch of a document that was cut before it is told from the one before, too.)
                    counts = False
                    crossings += begins[target[1]] == 0
                expected.append(target[0] if counts else IGNORED)
            assert batch["labels"][i].tolist() == expected
            assert batch["input_ids"][i].tolist() == [token for token, _ in ids[:length]]
            assert batch["attention_mask"][i].tolist() == [
                int(number >= 0) for _, number in ids[:length]
            ]
    assert not masks or crossings > 8 or name.startswith("none")


def test_masked_labels_are_those_of_the_rows_masks(tmp_path: Path) -> None:
    rows = [[5, 6, 7], [8], [], [9, 10, 11, 12, 13, 14]]
    masks = [[0, 1, 1], [0], [], [1, 0, 1, 0, 1, 0]]
    table = {
        "ids": pa.array(rows, pa.list_(pa.int32())),
        "mask": pa.array(masks, pa.list_(pa.int8())),
    }
    pq.write_table(pa.table(table), tmp_path / "chat.parquet")
    pq.write_table(
        pa.table({"ids": pa.array([[20, 21]], pa.list_(pa.int32()))}), tmp_path / "plain.parquet"
    )
    for labels in ("same", "shifted"):
        document = flat(
            ["parquet:chat.parquet:ids", "parquet:plain.parquet:ids"], "sequential", labels=labels
        )
        document |= {
            "packing": "none",
            "sequence_length": 5,
            "add_bos": True,
            "last_micro_step": "pad",
        }
        document["mixture"]["children"][0]["loss_mask"] = "mask"
        given = [
            (sample, target)
            for batch, _ in batches(order_of(tmp_path, document), "loss_mask")
            for sample, target in zip(
                batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True
            )
        ]
        bos, eot = 257, 256
        # The begin of text counts never, the end of text as the id before it does.
        full = [
            ([bos, 5, 6, 7, eot, 0], [0, 0, 1, 1, 1, 0]),
            ([bos, 8, eot, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
            ([bos, 9, 10, 11, 12, 13], [0, 1, 0, 1, 0, 1]),
            ([bos, 20, 21, eot, 0, 0], [1, 1, 1, 1, 0, 0]),
        ]
        at = int(labels == "shifted")
        expected = [
            (
                ids[:5],
                [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)][
                    at : at + 5
                ],
            )
            for ids, mask in full
        ]
        assert given[:4] == expected
        assert all(label == IGNORED for _, target in given[4:] for label in target)


def test_a_length_beyond_the_sample_is_refused() -> None:
    layout = Layout(batch_size=1, sequence_length=4, id_type="<u2", shifted=False, lengths=True)
    with pytest.raises(ProtocolError, match="a sample of 4 ids came with a length of 5"):
        Message(layout, step_numbers([0]), ids=bytes(8) + (5).to_bytes(4, "little"))
    with pytest.raises(
        ProtocolError, match=r"1 × 4 ids .* and what belongs to them are 12 bytes and 1 source ids"
    ):
        Message(layout, step_numbers([0]), ids=bytes(8))

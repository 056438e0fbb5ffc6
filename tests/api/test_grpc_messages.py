"""A delivery's bytes are the message that protobuf itself would have made, and what is handed over is what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.catalog import CATALOG
from support.corpora import encode_state
from tokenloom.connection.stream import read
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_server.api.grpc.messages import encode_delivery, hand_over
from tokenloom_server.config import mixture_file as config
from tokenloom_server.core.numbers import varint
from tokenloom_server.core.state import digest_hex
from tokenloom_server.order import builder
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.run.generation import Delivery


@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.parametrize("document_starts", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
def test_the_bytes_are_the_message_field_by_field(
    tmp_path: Path, labels: str, document_starts: bool, with_base: bool
) -> None:
    (tmp_path / "a.txt").write_text(
        "".join(f"row {i} of a file\n" for i in range(400)), encoding="utf-8"
    )
    found = config.parse(
        {
            "run": "r",
            "tokenizer": "bytes",
            "sequence_length": 16,
            "labels": labels,
            "mixture": {"policy": "weighted", "children": [{"source": "txt:a.txt:text"}]},
        },
        where="test",
        catalog=CATALOG,
    )
    order = builder.create(found, tmp_path, None)
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=2, batch_size=3, group_micro_steps=5)
    )
    pipeline.fill(group, 5)
    group.resume_state = encode_state(order, group.base)

    text = encode_delivery(
        1, Delivery(group, 1, 4, with_base), 6, 3, document_starts=document_starts
    )

    counts, starts = (
        group.document_starts(1, 1, 4) if document_starts else ([], np.empty(0, np.uint32))
    )
    expected = wire.StreamResponse(
        batches=wire.Batches(
            begin_index=6,
            micro_steps=[
                wire.MicroStep(
                    end_index=6 * (step + 1),
                    slice=group.slice_of(step, 1),
                    total_tokens=16 * 6 * (step + 1),
                    digest=digest_hex(group.marks[step].digest),
                    tokens=16 * 6,
                    label_tokens=(15 if labels == "same" else 16) * 6,
                    real_tokens=16 * 6 * (step + 1),
                )
                for step in (1, 2, 3)
            ],
            ids=b"".join(group.ids(1, 1, 4)),
            source_ids=[0] * 9,
            # Of the micro-step before it, and of each of its own.
            counts=wire.SourceCounts(
                entries=[1] * 4, source_ids=[0] * 4, samples=[6] * 4
            ).SerializeToString(),
            document_counts=counts,
            document_starts=starts.tolist(),
            base=wire.Base(sample_index=0, resume_state=group.resume_state.encode())
            if with_base
            else None,
        ),
        committed_through=6,
        server_epoch=3,
    )
    assert wire.StreamResponse.FromString(text) == expected
    assert len(text) == expected.ByteSize()
    assert (
        hand_over(1, Delivery(group, 1, 4, with_base), 6, 3, document_starts=document_starts)
        == read(text).delivered
    )


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**21 - 1, 2**21, 2**35])
def test_a_length_is_written_as_protobuf_reads_it(value: int) -> None:
    assert wire.StreamResponse.FromString(b"\x20" + varint(value)).committed_through == value

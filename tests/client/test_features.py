"""Rows from a server's bytes to torch: dtypes and shapes stay, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.features import document, order_of, write_arrow
from support.messages import step_numbers
from tokenloom.batch.rows import Bucket, Feature, RowsMessage
from tokenloom.batch.tensors import tensors_of
from tokenloom_proto.errors import ProtocolError
from tokenloom_server.order.steps import BatchPlan

ROWS = 8
SIZE = 4


def bits_of(tensor: torch.Tensor) -> list[Any]:
    """A tensor's bits as unsigned integers, row by row."""
    found: list[Any] = tensor.view(
        torch.uint16 if tensor.element_size() == 2 else torch.uint8
    ).tolist()
    return found


DTYPES: dict[str, tuple[torch.Tensor, Any, str | None]] = {
    "float16": (torch.randn(ROWS, 3, 5).half(), pa.float16(), None),
    "bfloat16": (torch.randn(ROWS, 3, 5).bfloat16(), pa.uint16(), "bfloat16"),
    "float8_e4m3fn": (torch.randn(ROWS, 3, 5).to(torch.float8_e4m3fn), pa.uint8(), "float8_e4m3fn"),
    "float8_e5m2": (torch.randn(ROWS, 3, 5).to(torch.float8_e5m2), pa.uint8(), "float8_e5m2"),
    "uint8": (torch.arange(ROWS * 15).to(torch.uint8).reshape(ROWS, 3, 5), pa.uint8(), None),
    "int8": (torch.arange(ROWS * 15).to(torch.int8).reshape(ROWS, 3, 5), pa.int8(), None),
    "uint16": (torch.arange(ROWS * 15).to(torch.uint16).reshape(ROWS, 3, 5), pa.uint16(), None),
    "int32": (-torch.arange(ROWS * 15, dtype=torch.int32).reshape(ROWS, 3, 5), pa.int32(), None),
    "float32": (torch.randn(ROWS, 3, 5), pa.float32(), None),
    "float64": (torch.randn(ROWS, 3, 5).double(), pa.float64(), None),
    "bool": (torch.arange(ROWS * 15).reshape(ROWS, 3, 5) % 3 == 0, pa.bool_(), None),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_comes_out_as_it_was_put_in(tmp_path: Path, dtype: str) -> None:
    tensor, stored, named = DTYPES[dtype]
    values = (
        tensor
        if named is None
        else tensor.view(torch.uint16 if stored == pa.uint16() else torch.uint8)
    ).tolist()
    # Beside a text, whose bytes put each sample at another place.
    columns = {
        "text": ["é" * i for i in range(ROWS)],
        "x": pa.array(values, pa.list_(pa.list_(stored, 5))),
    }
    write_arrow(tmp_path / "more", pa.table({"key": ["k"] * ROWS, **columns}), batch_rows=3)
    batching = {"bucket_by": "key", "dtypes": {"x": named}} if named else {"bucket_by": "key"}
    order = order_of(
        tmp_path,
        document(
            batching=batching,
            mixture={
                "policy": "sequential",
                "children": [{"source": "arrow:more:*", "alias": "m"}],
            },
        ),
    )
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=1, batch_size=SIZE, group_micro_steps=2)
    )
    pipeline.fill(group, 2)
    samples = group.ids(0, 0, 2)
    message = RowsMessage(
        SIZE,
        step_numbers(
            [0] * ROWS,
            2,
            tokens=[group.real_tokens(step)[0] for step in range(2)],
            label_tokens=[group.real_tokens(step)[1] for step in range(2)],
        ),
        data=b"".join(samples),
        buckets=[
            Bucket(
                group.batch_of(step).bucket,
                "m",
                tuple(Feature(*feature) for feature in group.batch_of(step).features),
                list(map(len, samples[step * SIZE : (step + 1) * SIZE])),
            )
            for step in range(2)
        ],
    )
    for step in range(2):
        batch = tensors_of(message.batch(step))
        assert batch["x"].dtype is tensor.dtype
        assert batch["x"].shape == (SIZE, 3, 5)
        expected = tensor[step * SIZE : (step + 1) * SIZE]
        if named is None:
            assert torch.equal(batch["x"], expected)
        else:
            assert bits_of(batch["x"]) == bits_of(expected)
        assert batch["text"] == ["é" * i for i in range(step * SIZE, (step + 1) * SIZE)]
        assert (batch["bucket"], batch["dataset_id"], batch["key"]) == ("k", "m", ["k"] * SIZE)
        assert (batch["global_tokens"], batch["global_label_tokens"]) == (SIZE, 0)


def message(data: bytes, features: tuple[Feature, ...], **fields: Any) -> RowsMessage:
    given = {"sample_bytes": None, "buckets": 1, "sources": 2} | fields
    return RowsMessage(
        2,
        step_numbers([0] * given["sources"]),
        data=data,
        buckets=[Bucket("b", "s", features, given["sample_bytes"])] * given["buckets"],
    )


X = Feature("x", "int16", (2,))
TEXT = Feature("t", "string", ())


def test_texts_of_one_size_need_no_sizes_beside_them() -> None:
    row = np.array([1, 2], "<i2").tobytes() + (3).to_bytes(4, "little") + b"abc"
    batch = tensors_of(message(row * 2, (X, TEXT)).batch(0))
    assert batch["x"].tolist() == [[1, 2]] * 2
    assert batch["t"] == ["abc", "abc"]


@pytest.mark.parametrize(
    ("data", "features", "fields", "says"),
    [
        (
            b"12345678",
            (X,),
            {"buckets": 0},
            "2 rows have 1 buckets and 2 source ids, but 0 and 2 came",
        ),
        (b"12345678", (X,), {"sources": 3}, "but 1 and 3 came"),
        (b"1234567", (X,), {}, "1 micro-steps have 8 bytes, but 7 came"),
        (b"12345678", (X,), {"sample_bytes": [4, 3]}, "2 rows of 4 bytes or more were expected"),
        (b"12345678", (X,), {"sample_bytes": [8]}, "2 rows of 4 bytes or more were expected"),
        (
            b"12345678",
            (Feature("x", "int17", (2,)),),
            {},
            "is of dtype 'int17', which this client does not know",
        ),
    ],
)
def test_a_message_that_does_not_fit_is_refused(
    data: bytes, features: Any, fields: Any, says: str
) -> None:
    with pytest.raises(ProtocolError, match=says):
        message(data, features, **fields)


def test_texts_that_do_not_fill_their_rows_are_refused() -> None:
    rows = (1).to_bytes(4, "little") + b"abc" + (3).to_bytes(4, "little") + b"abcd"
    with pytest.raises(
        ProtocolError, match=r"rows of \[7, 8\] bytes came, but their columns have \[5, 7\]"
    ):
        message(rows, (TEXT,), sample_bytes=[7, 8]).batch(0)

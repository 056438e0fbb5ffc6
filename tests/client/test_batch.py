"""From a message's bytes to tensors."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.messages import step_numbers
from tokenloom.batch.layout import Batch, Layout, check_columns
from tokenloom.batch.packed import Message
from tokenloom.batch.tensors import TensorMaker
from tokenloom_proto.errors import ProtocolError


def make(
    ids: NDArray[Any], *, sources: list[int], starts: list[list[int]] | None = None, **layout: Any
) -> list[Batch]:
    """Decodes steps of ids [steps, batch size, width], the first of which begins at sample index 100."""
    count, size, width = ids.shape
    shifted = layout.pop("shifted", False)
    columns = check_columns(layout.pop("columns", ()))
    form = Layout(
        batch_size=size,
        sequence_length=width - shifted,
        id_type=ids.dtype.str,
        shifted=shifted,
        columns=columns,
        **layout,
    )
    message = Message(
        form,
        step_numbers(sources, count, ranks=2, first=100),
        ids=ids.tobytes(),
        document_counts=[len(each) for each in starts or []],
        document_starts=[start for each in starts or [] for start in each],
    )
    maker = TensorMaker(form)
    return [cast("Batch", maker.batch(message, step)) for step in range(count)]


@pytest.mark.parametrize(("id_type", "largest"), [("<u1", 255), ("<u2", 65535), ("<u4", 2**32 - 1)])
def test_ids_of_every_width_become_int64_with_their_value(id_type: str, largest: int) -> None:
    ids = np.array([[[0, 1, largest], [2, largest, 3]]], id_type)

    (batch,) = make(ids, sources=[0, 1])

    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == ids[0].tolist()


def test_each_step_has_its_slice_of_global_sample_indices_and_the_runs_token_count() -> None:
    first, second = make(np.zeros((2, 3, 4), "<u2"), sources=[5, 6, 7, 8, 9, 10])

    assert first["sample_ids"].tolist() == [100, 101, 102]
    assert second["sample_ids"].tolist() == [109, 110, 111]
    assert (first["sample_index"], second["sample_index"]) == (106, 112)
    assert (first["total_tokens"], second["total_tokens"]) == (1000, 1001)
    assert (first["real_tokens"], second["real_tokens"]) == (2000, 2001)
    assert (first["global_tokens"], second["global_tokens"]) == (3000, 3001)
    assert (first["global_label_tokens"], second["global_label_tokens"]) == (4000, 4001)
    assert second["source_ids"].tolist() == [8, 9, 10]


def test_padding_samples_have_no_index_no_source_and_no_labels() -> None:
    (batch,) = make(np.ones((1, 2, 3), "<u2"), sources=[0, -1])

    assert batch["labels"].tolist() == [[1, 1, 1], [-100, -100, -100]]
    assert batch["input_ids"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert batch["sample_ids"].tolist() == [100, -1]
    assert batch["source_ids"].tolist() == [0, -1]


@pytest.mark.parametrize("shifted", [False, True])
def test_padding_samples_are_no_document(shifted: bool) -> None:
    (batch,) = make(
        np.zeros((1, 2, 3 + shifted), "<u2"),
        sources=[0, -1],
        starts=[[0, 2], []],
        shifted=shifted,
        columns=["document_ids", "position_ids", "attention_mask", "cu_seqlens"],
    )

    assert batch["document_ids"].tolist() == [[0, 0, 1], [-1, -1, -1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 1, 2]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 3, 6]


def test_tensors_can_be_written_to_without_changing_each_other() -> None:
    first, second = make(np.zeros((2, 1, 4), "<u2"), sources=[0, 0])

    first["labels"].fill_(-100)
    first["input_ids"].add_(1)

    assert first["input_ids"].tolist() == [[1, 1, 1, 1]]
    assert second["labels"].tolist() == second["input_ids"].tolist() == [[0, 0, 0, 0]]


def test_a_message_of_the_wrong_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(ProtocolError, match="are 12 bytes and 2 source ids, but 12 and 1 came"):
        make(np.zeros((1, 2, 3), "<u2"), sources=[0])


def test_document_starts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ProtocolError, match="2 samples of 3 tokens were asked for, but 1 counts"):
        make(np.zeros((1, 2, 3), "<u2"), sources=[0, 0], starts=[[0]], columns=["position_ids"])

"""From a message's bytes to tensors."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenloom.batch.layout import Batch, Layout, StepNumbers, check_columns
from tokenloom.batch.packed import Message
from tokenloom.batch.tensors import TensorMaker
from tokenloom_proto.errors import ProtocolError


def make(ids: NDArray[Any], *, sources: list[int], starts: list[list[int]] | None = None, **layout: Any) -> list[Batch]:
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
    numbers = StepNumbers(
        begin_indices=[100 + i * 2 * size for i in range(count)],
        end_indices=[100 + (i + 1) * 2 * size for i in range(count)],
        slices=[i % 2 for i in range(count)],
        total_tokens=[1000 + i for i in range(count)],
        real_tokens=[900 + i for i in range(count)],
        tokens=[50 + i for i in range(count)],
        label_tokens=[40 + i for i in range(count)],
        source_ids=sources,
    )
    message = Message(
        form,
        numbers,
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


def test_shifted_labels_are_the_ids_one_further() -> None:
    (batch,) = make(np.arange(10, dtype="<u2").reshape(1, 2, 5), sources=[0, 0], shifted=True)

    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_each_step_has_its_slice_of_global_sample_indices_and_the_runs_token_count() -> None:
    first, second = make(np.zeros((2, 3, 4), "<u2"), sources=[5, 6, 7, 8, 9, 10])

    assert first["sample_ids"].tolist() == [100, 101, 102]
    assert second["sample_ids"].tolist() == [109, 110, 111]
    assert (first["sample_index"], second["sample_index"]) == (106, 112)
    assert (first["total_tokens"], second["total_tokens"]) == (1000, 1001)
    assert (first["real_tokens"], second["real_tokens"]) == (900, 901)
    assert (first["global_tokens"], second["global_tokens"]) == (50, 51)
    assert (first["global_label_tokens"], second["global_label_tokens"]) == (40, 41)
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


def test_positions_and_documents_restart_where_documents_begin_and_at_each_sample() -> None:
    (batch,) = make(
        np.zeros((1, 4, 6), "<u2"),
        sources=[0, 0, 0, 0],
        starts=[[0, 4], [2], [], [0, 1, 5]],
        columns=["position_ids", "document_ids"],
    )

    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 0, 1],
        [0, 1, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5],
        [0, 0, 1, 2, 3, 0],
    ]
    assert batch["document_ids"].tolist() == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 2],
    ]


def test_a_document_that_begins_with_the_last_label_of_a_shifted_sample_belongs_to_the_next() -> None:
    (batch,) = make(
        np.zeros((1, 2, 5), "<u2"), sources=[0, 0], starts=[[1, 4], [0]], shifted=True, columns=["document_ids"]
    )

    assert batch["document_ids"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 0]]
    assert "position_ids" not in batch


def test_positions_equal_a_plain_loop_on_random_documents() -> None:
    random = np.random.default_rng(7)
    starts = [sorted(set(random.integers(0, 16, random.integers(0, 6)).tolist())) for _ in range(12)]
    batches = make(
        np.zeros((3, 4, 16), "<u2"), sources=[0] * 12, starts=starts, columns=["position_ids", "document_ids"]
    )

    positions, documents = [], []
    for begins in starts:
        position, document = -1, 0
        for token in range(16):
            position = 0 if token in begins else position + 1
            document += token in begins and token > 0
            positions.append(position)
            documents.append(document)
    assert torch.stack([batch["position_ids"] for batch in batches]).flatten().tolist() == positions
    assert torch.stack([batch["document_ids"] for batch in batches]).flatten().tolist() == documents


def test_a_message_of_the_wrong_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(ProtocolError, match="are 12 bytes and 2 source ids, but 12 and 1 came"):
        make(np.zeros((1, 2, 3), "<u2"), sources=[0])


def test_document_starts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ProtocolError, match="2 samples of 3 tokens were asked for, but 1 counts"):
        make(np.zeros((1, 2, 3), "<u2"), sources=[0, 0], starts=[[0]], columns=["position_ids"])

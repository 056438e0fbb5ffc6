"""What a batch is: its columns, and how the samples of a run travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from typing_extensions import NotRequired

#: The label that losses ignore.
IGNORED = -100
#: Source and sample id of a padding sample.
PADDING = -1
#: The columns that a batch has only where they are asked for.
OPTIONAL_COLUMNS = ("position_ids", "document_ids", "attention_mask", "loss_mask", "cu_seqlens")


class BatchNumbers(TypedDict):
    """The numbers of a batch: the same on every rank."""

    sample_index: int
    """End of the micro-step in the run's global order: what ``state_dict(at=)`` takes."""
    total_tokens: int
    """Tokens of the whole run after this micro-step: ``sequence_length`` for every sample."""
    real_tokens: int
    """Of these, those that are documents': without padding."""
    global_tokens: int
    """Its real tokens over all ranks: positions of ``input_ids`` that are not padding."""
    global_label_tokens: int
    """Labels that a causal model predicts, over all ranks and all micro-steps of the optimiser step that this batch
    belongs to (``accumulate``); the same in each of its batches. Those are the labels that are not −100; where labels
    equal ``input_ids`` (``labels: same``), without each sample's first, which has nothing before it. A sum of losses
    over these labels, divided by this number and summed over ranks and micro-steps, is the mean over all of them."""
    max_seqlen: NotRequired[int]
    """Of this rank alone: tokens of the longest document of ``cu_seqlens``, with which it comes."""


class Batch(BatchNumbers):
    """One micro-step of one rank: B samples of L tokens. Tensors are int64 and writable where nothing else is said."""

    input_ids: torch.Tensor
    """[B, L]"""
    labels: torch.Tensor
    """[B, L]; −100 where no loss is wanted."""
    source_ids: torch.Tensor
    """[B]; −1 for a padding sample."""
    sample_ids: torch.Tensor
    """[B], indices in the run's global order; −1 for a padding sample."""
    position_ids: NotRequired[torch.Tensor]
    """[B, L], counted from 0 in each document (and in padding)."""
    document_ids: NotRequired[torch.Tensor]
    """[B, L], numbers of the documents within each sample; −1 at a sample's padding."""
    attention_mask: NotRequired[torch.Tensor]
    """[B, L]: 1 at tokens, 0 at padding."""
    loss_mask: NotRequired[torch.Tensor]
    """[B, L]: 1 where the label counts, 0 where it is −100."""
    cu_seqlens: NotRequired[torch.Tensor]
    """int32, [documents + 1]: where each document begins among the B · L tokens of the batch, and their end, as
    ``flash_attn_varlen_func`` takes it. A sample's padding counts as a document."""


class NumpyBatch(BatchNumbers):
    """As ``Batch``, with numpy arrays of the same shapes, dtypes and values."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    source_ids: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    position_ids: NotRequired[NDArray[np.int64]]
    document_ids: NotRequired[NDArray[np.int64]]
    attention_mask: NotRequired[NDArray[np.int64]]
    loss_mask: NotRequired[NDArray[np.int64]]
    cu_seqlens: NotRequired[NDArray[np.int32]]


class RawColumn(NamedTuple):
    """A column of rows before it has a type, which numpy may not know."""

    name: str
    dtype: str
    """By its torch name, such as ``bfloat16``."""
    shape: tuple[int, ...]
    """[B, …]"""
    data: NDArray[np.uint8]
    """[B, bytes of a row]"""


def check_columns(columns: Iterable[str]) -> frozenset[str]:
    """The optional columns that are asked for. Raises ``ValueError`` for one that there is not."""
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    unknown = [name for name in names if name not in OPTIONAL_COLUMNS]
    if unknown or isinstance(columns, str):
        raise ValueError(
            f"columns must be a sequence of {', '.join(map(repr, OPTIONAL_COLUMNS))}; got "
            + (
                f"the text {columns!r}: write ({columns!r},)"
                if isinstance(columns, str)
                else repr(unknown[0])
            )
        )
    return frozenset(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is the same for all messages of a generation, as long as its batch size is."""

    batch_size: int
    sequence_length: int
    id_type: str
    """The numpy type of an id on the wire, such as ``<u2``."""
    shifted: bool
    """A sample travels as L + 1 ids, and labels are the ids one further."""
    lengths: bool = False
    """Samples may be padded, and travel with how many of their ids are not padding."""
    pads_left: bool = False
    loss_masks: bool = False
    """Samples travel with a bit for each id: whether it counts as a label."""
    mask_boundaries: bool = False
    """The first token of a document is no label for the document before it."""
    columns: frozenset[str] = frozenset()
    """The optional columns that batches have."""
    rows: bool = False
    """Samples are rows in batches from buckets; ``sequence_length`` is 1, and ``id_type`` says nothing."""

    @property
    def id_bytes(self) -> int:
        """Width of an id on the wire."""
        return int(self.id_type[2:])

    @property
    def width(self) -> int:
        """Ids of a sample on the wire."""
        return self.sequence_length + self.shifted

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample on the wire: its ids, its length, its mask's bits in whole uint32s."""
        return (
            self.width * self.id_bytes
            + 4 * self.lengths
            + (-(-self.width // 32) * 4 if self.loss_masks else 0)
        )

    @property
    def document_starts(self) -> bool:
        """Whether batches can only be made by who knows where documents begin."""
        return self.mask_boundaries or not self.columns.isdisjoint(
            ("position_ids", "document_ids", "cu_seqlens")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """The numbers of a message's steps: an entry for each micro-step, and of ``source_ids`` one for each sample."""

    begin_indices: Sequence[int]
    end_indices: Sequence[int]
    slices: Sequence[int]
    """Which part of the step's samples is this rank's, counted from 0."""
    total_tokens: Sequence[int]
    real_tokens: Sequence[int]
    tokens: Sequence[int]
    label_tokens: Sequence[int]
    """Over all ranks, as ``tokens``."""
    source_ids: Sequence[int]

    def of_batch(self, step: int) -> dict[str, int]:
        """The numbers that the batch of a micro-step has."""
        return {
            "sample_index": self.end_indices[step],
            "total_tokens": self.total_tokens[step],
            "real_tokens": self.real_tokens[step],
            "global_tokens": self.tokens[step],
            "global_label_tokens": self.label_tokens[step],
        }


class Samples:
    """Which samples the micro-steps of a message have."""

    def __init__(self, steps: StepNumbers, batch_size: int) -> None:
        self._steps = steps
        self._batch_size = batch_size
        # [micro-steps, B]: each batch gets a row, which no other has.
        self.source_ids = np.array(steps.source_ids, np.int64).reshape(-1, batch_size)
        #: [micro-steps, B]: which samples are padding; None where none is.
        self.padding = self.source_ids == PADDING if PADDING in steps.source_ids else None

    def of_batch(self, step: int) -> dict[str, NDArray[np.int64]]:
        """Source and sample id of each of this rank's samples of a micro-step, [B] each."""
        first = self._steps.begin_indices[step] + self._steps.slices[step] * self._batch_size
        sample_ids = np.arange(first, first + self._batch_size)
        if self.padding is not None:
            sample_ids[self.padding[step]] = PADDING
        return {"source_ids": self.source_ids[step], "sample_ids": sample_ids}

"""The seam for packers: blocks of whole samples, each with the cursor after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import Cursor, FileCursor, Lane, RowCounts, SourceState
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.real_tokens import Boundaries
from tokenloom_server.packing.samples import Int64s, Sample, SampleFormat, hashed
from tokenloom_server.packing.tokenized_rows import DocumentSpan
from tokenloom_server.sources.tensors import item_bytes


class SourcePosition(NamedTuple):
    """Where a source stands: its cursor, its rows counter, its row counts; and its lanes, where it has several."""

    cursor: Cursor | None
    rows: int
    row_counts: RowCounts
    lanes: tuple[Lane, ...] = ()

    @classmethod
    def of(cls, state: SourceState) -> SourcePosition:
        """Where a state has it."""
        return cls(state.cursor, state.rows, state.row_counts, state.lanes)


class Feature(NamedTuple):
    """A column of a batch of rows: ``dtype`` by its torch name, and the shape of each sample's tensor; ``string`` and
    ``binary`` have none."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What it takes of the part of a sample that has one size: of a text, its own size in bytes (uint32)."""
        size = item_bytes(self.dtype)
        return math.prod(self.shape) * size if size else 4


class Batch(NamedTuple):
    """What a batch of rows is made of: its bucket's name, and the columns, as they lie in each sample's bytes."""

    bucket: str
    features: tuple[Feature, ...]


#: Makes a cursor of epoch, part of the epoch, row in it, and count: of the row's tokens that were taken, or of samples.
MakeCursor = Callable[[int, int, int, int], Cursor]


class SampleOrigins(Protocol):
    """Where do a block's samples lie in their source? What is kept of a block once its ids are sent. Samples are named
    by their numbers within the source, of which the block's are consecutive."""

    @property
    def first_sample(self) -> int:
        """The block's first."""

    @property
    def batch(self) -> Batch | None:
        """The batch, where the block is a batch of rows; else None."""

    def __len__(self) -> int:
        """How many samples it has."""

    def after(self, sample: int) -> SourcePosition:
        """Where the source stands after a sample."""

    def starts_of(self, sample: int) -> npt.NDArray[np.uint32]:
        """Where documents begin in a sample, from the sample's first id."""

    def boundaries(self, first: int, end: int) -> Boundaries:
        """``starts_of`` the samples from ``first`` to before ``end``, of all at once."""


@dataclass(frozen=True, slots=True)
class BlockOrigins:
    """Implements ``SampleOrigins``.

    ``length``: tokens that a sample advances by, or counts. ``cursors`` [n, 5] int64: what ``make_cursor`` takes, and
    the source's rows counter, *after* each sample. ``starts`` uint32: the positions, in tokens from the block's
    first, where documents begin; those of sample i are ``starts[bounds[i]:bounds[i + 1]]``. ``bounds``
    [n + 1] int64. ``row_counts`` [n, 5] int64: the source's ``RowCounts`` after each sample; [1, 5] where they are the
    same after all of them.
    """

    length: int
    first_sample: int
    cursors: npt.NDArray[np.int64]
    starts: npt.NDArray[np.uint32]
    bounds: npt.NDArray[np.int64]
    row_counts: npt.NDArray[np.int64]
    #: Whether a document that begins with the next sample does so in this one, too, which has its first id as a label.
    overlaps: bool = False
    #: Makes a cursor of the first four numbers in a row of ``cursors``.
    make_cursor: MakeCursor = field(default=FileCursor, kw_only=True)
    #: The batch, where the block is a batch of rows.
    batch: Batch | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.cursors)

    def after(self, sample: int) -> SourcePosition:
        index = sample - self.first_sample
        *cursor, rows = self.cursors[index].tolist()
        row_counts = RowCounts(*self.row_counts[min(index, len(self.row_counts) - 1)].tolist())
        return SourcePosition(self.make_cursor(*cursor), rows, row_counts)

    def starts_of(self, sample: int) -> npt.NDArray[np.uint32]:
        index = sample - self.first_sample
        begin, end = int(self.bounds[index]), int(self.bounds[index + 1])
        if (
            self.overlaps
            and end < len(self.starts)
            and self.starts[end] == (index + 1) * self.length
        ):
            end += 1
        return self.starts[begin:end] - np.uint32(index * self.length)

    def boundaries(self, first: int, end: int) -> Boundaries:
        index, end_index = first - self.first_sample, end - self.first_sample
        bounds = self.bounds[index : end_index + 1]
        sample = np.repeat(np.arange(end - first), np.diff(bounds))
        starts = (
            self.starts[bounds[0] : bounds[-1]].astype(np.int64) - (index + sample) * self.length
        )
        if not self.overlaps:
            return Boundaries(sample, starts)
        ends = np.arange(index + 1, end_index + 1) * self.length
        last = np.flatnonzero(np.append(self.starts, np.uint32(0))[bounds[1:]] == ends)
        return Boundaries(
            np.append(sample, last), np.append(starts, np.full(len(last), self.length))
        )


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive samples of one source.

    ``ids``: each sample as it travels (see ``SampleFormat``; views of the block's memory, which may overlap; read
    only). ``hashes``: their XXH3-128, seeded with the source id. ``real``: how many of their tokens are documents'.
    """

    ids: list[Sample]
    hashes: list[int]
    origins: SampleOrigins
    real: list[int] = field(default_factory=list)


class Packer(Protocol):
    """Turns one source's documents into samples, from a state on. A packer is a pure function of the
    documents and the state; whatever it buffers, it rebuilds from the cursor."""

    def blocks(self) -> Iterator[Block]:
        """Blocks until the source is out."""

    @property
    def dropped_tokens(self) -> int:
        """The tail that filled no sample; valid once ``blocks`` ended."""


class DocumentPacker(Packer, Protocol):
    """One whose samples are documents' tokens."""

    def spans(self, count: int) -> Iterator[list[DocumentSpan]]:
        """What the next ``count`` samples are made of, by reading their rows; fewer where the source ends."""


class FormattedPacker:
    """What packers of documents have in common: where they begin, and the blocks that they give."""

    #: The tail that filled no sample.
    dropped_tokens = 0

    def __init__(
        self, documents: Documents, state: SourceState, *, source_id: int, form: SampleFormat
    ) -> None:
        """``form``: how samples travel."""
        self._documents = documents
        self._state = state
        self._source_id = source_id
        self.form = form

    def _block(
        self,
        samples: list[Sample],
        first_sample: int,
        cursors: Int64s,
        starts: Int64s,
        bounds: Int64s,
        row_counts: Int64s,
        *,
        overlaps: bool = False,
        filled: Int64s | None = None,
        make_cursor: MakeCursor | None = None,
    ) -> Block:
        """As ``BlockOrigins`` has them. ``first_sample``: its number since the run began. ``filled``: how many ids of
        each sample are documents'; None for all of them."""
        origins = BlockOrigins(
            length=self.form.length,
            first_sample=first_sample,
            cursors=cursors,
            starts=starts.astype(np.uint32),
            bounds=bounds,
            row_counts=row_counts,
            overlaps=overlaps,
            make_cursor=make_cursor or self._documents.cursor_kind,
        )
        real = (
            [self.form.length] * len(samples)
            if filled is None
            else self.form.real_tokens(filled).tolist()
        )
        return Block(samples, hashed(samples, self._source_id), origins, real)


#: Builds the packer of a source (by id) that goes on from a state.
PackerFactory = Callable[[int, SourceState], Packer]

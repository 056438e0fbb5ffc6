"""A source as the pipeline sees it: its files (shards), and the rows of one from any row on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa


class Content(StrEnum):
    """What a source's column holds."""

    TEXT = "text"
    IDS = "ids"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a source (for ``arrow:``, one of the folder's files), as frozen in the manifest.

    ``path`` is as the spec names it (relative to the mixture file where the spec is), so that a
    manifest, and so a run, can move with its folder. ``fingerprint`` is a hash of the file's size,
    head and footer. A changed modification time alone is no change.
    """

    path: str
    size: int
    fingerprint: str
    spots: str = field(default="", compare=False)
    """Of a local file whose middle the fingerprint does not see, ``MODIFIED:COUNT:DIGEST``: when it was last written,
    nanoseconds, and its ``files.spot_digest``."""


class BadRow(NamedTuple):
    """A row that does not decode: its position in its ``Rows``, and the whole message of an error about it."""

    position: int
    reason: str


class Rows(NamedTuple):
    """Consecutive rows of one shard.

    ``column`` is a ``pyarrow.Array`` without chunks: (large_)string for text, (large_)list of an
    integer type for ids. A null counts as an empty row. ``bad`` (ascending) and ``filtered`` (bool, [rows]; None:
    every row passed) are the rows that are there as empty ones; none is both. ``sizes`` (int64, [rows]): the bytes of
    each row's text, where the column has its ids instead.
    """

    first_row: int
    column: pa.Array
    bad: tuple[BadRow, ...] = ()
    filtered: npt.NDArray[np.bool_] | None = None
    sizes: npt.NDArray[np.int64] | None = None

    def cut(self, start: int, stop: int) -> Rows:
        """The rows from ``start`` to ``stop``, counted from the first."""
        bad = tuple(
            BadRow(row.position - start, row.reason)
            for row in self.bad
            if start <= row.position < stop
        )
        filtered = None if self.filtered is None else self.filtered[start:stop]
        sizes = None if self.sizes is None else self.sizes[start:stop]
        return Rows(
            self.first_row + start, self.column.slice(start, stop - start), bad, filtered, sizes
        )


class Source(Protocol):
    """One opened source. Reading has no state but the iterator's own, and is for one thread; counts and blocks may be
    asked for by several."""

    @property
    def content(self) -> Content: ...

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files in reading order. At least one."""

    def row_count(self, shard: int) -> int:
        """Rows in a shard; builds that shard's index on first touch (cached by its fingerprint)."""

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        """The rows with which a shard's blocks begin, ascending from 0, and after them its row count. A block is what
        can be read by itself: a row group, a record batch, some lines of a text; a shuffle of rows takes the blocks in
        another order. A file that is always read from its head is one block."""

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        """Rows of a shard from ``row`` to its end, in order.

        Opening costs at most one row group, record batch or seek, whatever ``row`` is. ``row`` may
        equal the number of rows: then nothing is yielded. One ``Rows`` holds at most about a
        mebibyte of text, or half a million ids, unless a single row is larger. Raises ``SourceError``, naming the
        file, when it is unreadable or damaged; and after all rows before it, at a row that does not decode, naming
        the row, unless the source was opened with ``RowRules.skip_bad``.
        """


class TensorFile(Protocol):
    """An opened file whose rows are read as tensors, in any order. A part of it is what is decoded at once: a record
    batch, a row group.

    Its methods may raise what Arrow and the operating system raise, and ``ValueError``.
    """

    @property
    def schema(self) -> pa.Schema:
        """A ``pyarrow.Schema``."""

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """[parts + 1]: the row with which each part begins, and the number of rows."""

    @property
    def mapped(self) -> bool:
        """Whether its parts take no memory of their own."""

    @property
    def decoded_bytes(self) -> int:
        """About how many bytes the file has, decoded."""

    def read(self, part: int, names: Sequence[str]) -> list[pa.Array]:
        """Columns of a part, as ``pyarrow.Array``."""

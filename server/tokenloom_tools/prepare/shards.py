"""Shards of documents as lists of ids: Arrow to be mapped, or Parquet with page checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.arrow import BLOCK_ROWS

ShardFormat = Literal["arrow", "parquet"]

#: Ids that become one record batch or row group: what opening at any row costs.
BATCH_IDS = 1 << 20
#: Rows that do: bounds the offsets of rows that are empty or nearly so.
BATCH_ROWS = 1 << 16
#: Rows of a block of an Arrow shard. A window of 65,536 rows has 2,048 of these, from everywhere in the source, while a
#: batch has as many rows as is fast to write, and to read in order.
SHUFFLED_ROWS = 32
#: What the offsets of a list can hold.
MAX_ROW_IDS = 2**31 - 1 - BATCH_IDS
#: Bytes of the dictionary of a Parquet column, so that it holds a large vocabulary.
_DICTIONARY_BYTES = 1 << 22

COLUMN = "ids"


class ShardWriter:
    """Writes one file with the column ``ids``: lists of an unsigned integer type. Not for several threads."""

    def __init__(self, path: Path, dtype: np.dtype[Any], form: ShardFormat) -> None:
        """Raises ``OSError``."""
        self._dtype = dtype
        # Of Parquet a row group is decoded as a whole, so there it is the block.
        metadata = {BLOCK_ROWS: b"%d" % SHUFFLED_ROWS} if form == "arrow" else None
        self._schema = pa.schema([pa.field(COLUMN, pa.list_(pa.from_numpy_dtype(dtype)))], metadata)
        self._writer = (
            pa.ipc.new_file(str(path), self._schema)
            if form == "arrow"
            else pq.ParquetWriter(
                str(path),
                self._schema,
                compression="none",  # the dictionary makes ids as small as a general compression would
                dictionary_pagesize_limit=_DICTIONARY_BYTES,
                write_page_checksum=True,
            )
        )
        self._values: list[npt.NDArray[np.unsignedinteger]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._ids = self._rows = 0
        self.rows = self.tokens = 0

    def add(self, values: npt.NDArray[np.unsignedinteger], ends: npt.NDArray[np.int64]) -> None:
        """Appends rows: row i lies between ``ends[i - 1]`` and ``ends[i]``. Raises ``SourceError`` for one that no
        list can hold."""
        lengths = np.diff(ends, prepend=0)
        if len(lengths) and int(lengths.max()) > MAX_ROW_IDS:
            raise SourceError(
                f"a row has {int(lengths.max())} tokens, but a list holds {MAX_ROW_IDS}; part the row"
            )
        self._values.append(values.astype(self._dtype, copy=False))
        self._lengths.append(lengths)
        self._ids += len(values)
        self._rows += len(ends)
        if self._ids >= BATCH_IDS or self._rows >= BATCH_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        ids, lengths = np.concatenate(self._values), np.concatenate(self._lengths)
        begin = first = 0
        while first < len(lengths):
            # Usually all: only rows of very many ids are more than one list's offsets can count.
            ends = np.cumsum(lengths[first : first + BATCH_ROWS])
            count = max(1, int(np.searchsorted(ends, MAX_ROW_IDS, "right")))
            offsets = np.zeros(count + 1, np.int32)
            offsets[1:] = ends[:count]
            size = int(offsets[-1])
            rows = arrays.lists(offsets, arrays.from_numbers(ids[begin : begin + size]))
            self._writer.write_batch(pa.record_batch([rows], schema=self._schema))
            begin, first = begin + size, first + count
        self.rows += self._rows
        self.tokens += self._ids
        self._values, self._lengths, self._ids, self._rows = [], [], 0, 0

"""Samples as Megatron-LM's ``GPTDataset`` cuts and orders them, by the arrays that it caches.

Sample ``i`` is number ``s = shuffle_index[i]`` of one stream of ids: the sequences ``document_index``, one after the
other, from ``sample_index[s]`` (a position in that order, and an offset in the sequence there) to ``sample_index[s +
1]``, and the id after it, which is also the next one's first.

Source of the rule: ``megatron/core/datasets/gpt_dataset.py`` of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays, columns, flat_ids
from tokenloom_server.sources.base import Rows
from tokenloom_server.sources.flat_ids import FlatIds
from tokenloom_server.sources.megatron.reader import MegatronSource

#: The places of the arrays among a source's files, and of the ids.
DOCUMENTS, BOUNDS, ORDER, DATA = 1, 2, 3, 4
#: Gathered at once.
CHUNK_SAMPLES = 1 << 8


class MegatronSamples(MegatronSource):
    """A source of samples; they are rows of the array of their order."""

    def row_count(self, shard: int) -> int:
        return len(self._array(ORDER)) if shard == ORDER else 0

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        where, count = self._where(self._shards[shard]), self.row_count(shard)
        self._check_row(shard, row, count)
        for first in range(row, count, CHUNK_SAMPLES):
            try:
                samples = self._samples(
                    self._array(ORDER)[first : first + CHUNK_SAMPLES].astype(np.int64)
                )
            except (IndexError, ValueError) as error:
                raise SourceError(
                    f"{where}: samples {first} and following are not of the dataset that the description names "
                    f"({error}): it was made anew, or the cache is damaged; put back what the job read"
                ) from None
            yield from columns.rows(samples, first, where, valid=True)

    def _samples(self, numbers: npt.NDArray[np.int64]) -> pa.Array:
        """Lists of ids. Raises ``IndexError`` and ``ValueError`` where the arrays do not fit the dataset."""
        index = self._index(DATA)
        with self._open(self._shards[DATA]) as file:
            ids = FlatIds(file, index.kind, 0, index.ids)
        bounds = self._array(BOUNDS)
        begins, ends = bounds[numbers].astype(np.int64), bounds[numbers + 1].astype(np.int64)
        # Each sample's parts, one of each sequence that it touches.
        counts = ends[:, 0] - begins[:, 0] + 1
        lasts = np.cumsum(counts)
        firsts = lasts - counts
        sequences = self._array(DOCUMENTS)[_ranges(begins[:, 0], counts)]
        starts, lengths = (
            index.pointers[sequences] // index.kind.itemsize,
            index.lengths[sequences].astype(np.int64),
        )
        lengths[lasts - 1] = np.minimum(ends[:, 1] + 1, lengths[lasts - 1])
        lengths[firsts] -= begins[:, 1]
        starts[firsts] += begins[:, 1]
        values = ids.numbers(0, ids.count)[_ranges(starts, lengths)]
        return arrays.lists(
            np.append(0, np.cumsum(lengths))[np.append(firsts, lasts[-1])], pa.array(values)
        )

    def _array(self, place: int) -> npt.NDArray[np.int64]:
        """A cached array, mapped."""
        shard = self._shards[place]
        with self._open(shard) as file:
            try:
                array: npt.NDArray[np.int64] = np.load(
                    flat_ids.local(file).path, mmap_mode="r", allow_pickle=False
                )
                return array
            except (ValueError, EOFError) as error:
                raise SourceError(
                    f"{self._where(shard)} is no array of numpy: {error}; copy it again"
                ) from None


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers from each start on, so many each, one after the other."""
    if (lengths < 0).any():
        raise ValueError("a sample ends before it begins")
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)

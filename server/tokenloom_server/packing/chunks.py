"""Chunks of arrays put in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tokenloom_server.sources import arrays


def take_chunks(
    values: npt.NDArray[Any], edges: npt.NDArray[np.int64], order: npt.NDArray[np.int64], total: int
) -> npt.NDArray[Any]:
    """[total]: chunks of the values, those that ``order`` names in its order. Chunk i is
    ``values[edges[i] : edges[i + 1]]``; ``edges`` ascend. ``total``: the values of the chunks that are taken.

    Arrow copies each chunk at once, as it does strings of bytes: measured at ten times the speed of indexing with
    numpy, which goes value by value.
    """
    offsets = np.ascontiguousarray(edges * values.itemsize)
    chunks = pa.Array.from_buffers(
        pa.large_binary(),
        len(edges) - 1,
        [None, pa.py_buffer(offsets), pa.py_buffer(values)],
        null_count=0,
    )
    taken = pc.take(chunks, arrays.from_numbers(order), boundscheck=False).buffers()[2]
    return np.frombuffer(taken, values.dtype, total) if total else np.empty(0, values.dtype)


class Chunks:
    """Chunks that lie in several arrays, to be taken in another order; none is copied before it is taken."""

    def __init__(self, parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]) -> None:
        """Of each part the values, contiguous and of the same dtype in all, and [chunks] where each chunk ends in them.
        They must stay as they are. Raises ``ValueError`` where the ends do not ascend up to the values' end."""
        self._values = [values for values, _ in parts]
        self.dtype = self._values[0].dtype
        begins, ends = [], []
        for values, ends_here in parts:
            edges = np.append(np.int64(0), ends_here)
            if (
                edges[-1] != len(values)
                or bool((edges[1:] < edges[:-1]).any())
                or values.dtype != self.dtype
            ):
                raise ValueError("chunks that do not lie one after the other in their values")
            edges = values.ctypes.data + edges * values.itemsize
            begins.append(edges[:-1])
            ends.append(edges[1:])
        self._begins, self._ends = np.concatenate(begins), np.concatenate(ends)

    def take(self, order: npt.NDArray[np.int64], total: int) -> npt.NDArray[Any]:
        """[total]: the values of the chunks that ``order`` names, in its order, as ``take_chunks`` copies them."""
        if not total:
            return np.empty(0, self.dtype)
        begins, ends, size = self._begins[order], self._ends[order], total * self.dtype.itemsize
        # To Arrow all memory from the first of these chunks to the last is one array. Every other of its strings lies
        # between two chunks, and is not looked at. What they all say to be long together makes room for the result.
        origin = int(begins.min())
        offsets = np.empty(2 * len(order) + 1, np.int64)
        offsets[0:-1:2], offsets[1::2] = begins - origin, ends - origin
        offsets[-1] = offsets[0] + 2 * size
        span = max(int(ends.max()) - origin, int(offsets[-1]))
        memory = pa.foreign_buffer(origin, span, self._values)
        chunks = pa.Array.from_buffers(
            pa.large_binary(), 2 * len(order), [None, pa.py_buffer(offsets), memory], null_count=0
        )
        taken = pc.take(
            chunks, arrays.from_numbers(np.arange(0, 2 * len(order), 2)), boundscheck=False
        ).buffers()[2]
        return np.frombuffer(taken, self.dtype, total)

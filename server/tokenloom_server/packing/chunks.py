"""Chunks of arrays put in another order."""

from __future__ import annotations

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
        pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(values)], null_count=0
    )
    taken = pc.take(chunks, arrays.from_numbers(order), boundscheck=False).buffers()[2]
    return np.frombuffer(taken, values.dtype, total) if total else np.empty(0, values.dtype)

"""A file of nothing but ids, mapped: documents are ranges of it, and become rows without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError, reason
from tokenloom_server.sources import arrays
from tokenloom_server.storage.file import File, LocalFile


def local(file: File) -> LocalFile:
    """A file that can be mapped."""
    assert isinstance(file, LocalFile), "no other location is looked up for these schemes"
    return file


class FlatIds:
    """``count`` ids of an integer type from byte ``begin`` of a file on. Stays mapped while an array of it is alive."""

    def __init__(self, file: File, kind: npt.DTypeLike, begin: int, count: int) -> None:
        """The file may be closed afterwards. Raises ``SourceError``."""
        self.kind = np.dtype(kind)
        self.count = count
        self._begin = begin
        # A file of 0 bytes cannot be mapped.
        try:
            self._mapped = pa.memory_map(str(local(file).path)) if count else None
        except OSError as error:
            raise SourceError(f"{file.name} cannot be mapped ({reason(error)})") from None

    def numbers(self, first: int, stop: int) -> npt.NDArray[Any]:
        """The ids from position ``first`` up to, not with, ``stop``; not copied."""
        return np.frombuffer(self._buffer(first, stop), self.kind)

    def rows(self, edges: npt.NDArray[np.int64]) -> pa.Array:
        """Lists of ids: row i lies between the positions ``edges[i]`` and ``edges[i + 1]``; not copied."""
        first, stop = int(edges[0]), int(edges[-1])
        ids = pa.Array.from_buffers(
            pa.from_numpy_dtype(self.kind), stop - first, [None, self._buffer(first, stop)], 0
        )
        return arrays.lists(np.subtract(edges, first), ids)

    def _buffer(self, first: int, stop: int) -> pa.Buffer:
        if self._mapped is None or first == stop:
            return pa.py_buffer(b"")
        # Range by range, since Arrow has the kernel fetch all that is asked for.
        self._mapped.seek(self._begin + first * self.kind.itemsize)
        return self._mapped.read_buffer((stop - first) * self.kind.itemsize)

"""Files as Arrow's readers take them."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa

from tokenloom_server.storage.file import File
from tokenloom_server.storage.local import LocalFile


def for_arrow(file: File) -> Any:
    """A local file's path, which Arrow opens itself; anything else as a ``pa.PythonFile`` over it.

    What reading raises comes out of Arrow as it is.
    """
    return str(file.path) if isinstance(file, LocalFile) else pa.PythonFile(_Stream(file), mode="r")


class _Stream:
    """A position in a file."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._position = 0
        self.closed = False

    def read(self, length: int = -1) -> bytes | memoryview:
        if length < 0:
            length = self._file.size - self._position
        data = self._file.read_at(self._position, length)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return not self.closed

    def seekable(self) -> bool:
        return not self.closed

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        # The file is its opener's to close.
        self.closed = True

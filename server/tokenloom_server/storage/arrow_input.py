"""Files as Arrow's readers take them."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa

from tokenloom_server.storage.file import File, LocalFile


def for_arrow(file: File) -> Any:
    """A local file's path, which Arrow opens itself; anything else as a ``pa.PythonFile`` over it.

    What reading raises comes out of Arrow as it is.
    """
    return file.path if isinstance(file, LocalFile) else FileStream(file).for_arrow()


class FileStream:
    """A file with a position, as Python's streams are."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.position = 0
        self.closed = False

    def for_arrow(self) -> Any:
        """The stream as a ``pa.NativeFile``."""
        return pa.PythonFile(self, mode="r")

    def read(self, length: int = -1) -> bytes | memoryview:
        data = self._file.read_at(
            self.position, self._file.size - self.position if length < 0 else length
        )
        self.position += len(data)
        return data

    def seek(self, offset: int, origin: int = io.SEEK_SET) -> int:
        self.position = (
            offset
            + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self._file.size}[origin]
        )
        return self.position

    def tell(self) -> int:
        return self.position

    def readable(self) -> bool:
        return not self.closed

    def seekable(self) -> bool:
        return not self.closed

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        # The file is its opener's to close.
        self.closed = True

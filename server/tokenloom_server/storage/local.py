"""Files of this machine, and of what it has mounted."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tokenloom_proto.files import open_file

from tokenloom_server.errors import SourceChanged, StorageError, reason
from tokenloom_server.storage.file import File


class LocalFile(File):
    def __init__(self, path: Path | str, name: str) -> None:
        """Raises ``OSError`` where it cannot be opened."""
        self.path = os.fspath(path)
        self.name = name
        self._file = open_file(path)
        self._descriptor = self._file.fileno()
        self.size = os.fstat(self._descriptor).st_size

    @property
    def modified_ns(self) -> int:
        """When it was last written, nanoseconds."""
        return os.fstat(self._descriptor).st_mtime_ns

    def mapped(self) -> mmap.mmap:
        """All of it as memory, for as long as anything has a view of it. Raises ``ValueError`` for an empty file."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

    def read_at(self, offset: int, length: int) -> bytes:
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        try:
            data = os.pread(self._descriptor, length, offset)
            # One read may return less than was asked for, on network file systems above all.
            while len(data) < length and (
                more := os.pread(self._descriptor, length - len(data), offset + len(data))
            ):
                data += more
        except OSError as error:
            raise StorageError(
                f"{self.name} cannot be read ({reason(error)}); look at the disk or mount, and start again: "
                "nothing is lost"
            ) from None
        if len(data) < length:
            raise SourceChanged(
                f"{self.name} ends at byte {offset + len(data)}, expected {self.size} bytes: it was shortened while "
                "being read; put it back as it was, or begin a new run with another name"
            )
        return data

    def close(self) -> None:
        self._file.close()


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` whole or not at all, whoever else writes it. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name[:16]}-", delete=False
    ) as file:
        try:
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise

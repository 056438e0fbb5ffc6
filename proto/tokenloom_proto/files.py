"""Files that somebody names by path: read whole only where they are files, and of a bounded size."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from pathlib import Path

#: Of files of which a user may have large ones, such as a tokeniser.
MOST_BYTES = 2**28
#: Of files whose size is not known.
_KERNEL_BYTES = 2**16


def open_file(path: Path | str, most_bytes: int = sys.maxsize) -> io.FileIO:
    """Opens a file, and waits for nothing where it is a pipe or a device. Raises ``OSError``, also for these, and for
    more bytes."""
    file = io.FileIO(path, opener=_opened)
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes:
        return file
    file.close()
    size = f"it has {status.st_size:,} bytes, and at most {most_bytes:,} are read"
    fault = size if stat.S_ISREG(status.st_mode) else "it is a pipe or a device, and no file"
    raise OSError(errno.EINVAL, fault, str(path))


def _opened(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All of a file. Raises ``OSError``, as ``open_file`` does."""
    with io.BufferedReader(open_file(path, most_bytes)) as file:
        # Files of the kernel say that they are empty, and some have no end.
        return file.read(os.fstat(file.fileno()).st_size or _KERNEL_BYTES)


def resolved(path: Path) -> Path:
    """A path without links. Where they lead in a circle it stays one that cannot be read."""
    return Path(os.path.realpath(path))

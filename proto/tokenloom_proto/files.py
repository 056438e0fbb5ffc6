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


# Why the system refuses a file: where rights are missing, at which part of its path, to whom, and what gives them.


def reason(error: Exception, *, private: bool = False) -> str:
    """What the system says. ``private``: the file is for its owner alone, so that others get no right to it."""
    said: str = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, PermissionError) or not isinstance(error.filename, (str, os.PathLike)):
        return said
    path, user = Path(os.path.realpath(error.filename)), os.geteuid()
    wanted = [(folder, os.X_OK, "enter") for folder in reversed(path.parents)]
    wanted += [
        (path, os.R_OK, "read"),
        (path, os.W_OK, "write to"),
        (path.parent, os.W_OK, "write to"),
    ]
    for place, right, verb in wanted:
        if os.access(place, right) or not os.path.lexists(place):
            continue
        # All above it may be entered, and no part of it is a link: so it can be looked at.
        status, remedy = place.stat(), f"chmod a+rX {place}"
        if right == os.W_OK or (private and place == path):
            remedy = f"chown {user} {place} && chmod u+rwX {place}"  # others get no such right
        return (
            f"{said}: user {user} may not {verb} {place}, which is user {status.st_uid}'s, mode "
            f"{status.st_mode & 0o7777:04o}: {remedy}, or on the host what a container has mounted there"
        )
    return said

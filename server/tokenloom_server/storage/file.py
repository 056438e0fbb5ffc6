"""A file as readers have it, here or elsewhere; files of this machine: read, and written whole or not at all."""

from __future__ import annotations

import abc
import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Self

import xxhash
from tokenloom_proto.files import open_file

from tokenloom_server.errors import SourceChanged, StorageError, reason


class Range(NamedTuple):
    """Bytes [begin, end) of a file."""

    begin: int
    end: int


class File(abc.ABC):
    """A file opened for reading at any place, by one thread at a time."""

    #: How messages name it.
    name: str
    #: Its length in bytes when it was opened.
    size: int

    @abc.abstractmethod
    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """``length`` bytes from ``offset`` on, and fewer only where ``size`` is reached.

        Raises ``SourceChanged`` where the file has become another one or shorter meanwhile, and ``StorageError`` where
        its storage fails: that says nothing about what is in the file.
        """

    def plan(self, ranges: Iterable[Range]) -> None:  # noqa: B027
        """That these bytes will be read, in this order. It changes nothing but how long they are waited for.

        ``ranges`` are asked for as reading goes on.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of it; the bytes that were read stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Files of this machine, and of what it has mounted.


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


# Files that appear under their name whole or not at all, even where the machine fails meanwhile; their checksums.


def draft_of(path: Path) -> Path:
    """Where a file is written until it is whole: beside ``path``, hidden, with the ending ``.draft``."""
    return path.with_name(f".{path.name}.draft")


def publish(draft: Path, path: Path) -> None:
    """Brings a draft to disk, then gives it its name. Raises ``OSError``."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Writes a file of text as a draft, and publishes it. Raises ``OSError``."""
    draft = draft_of(path)
    draft.write_text(text, encoding="utf-8")
    publish(draft, path)


def checksum(path: Path) -> str:
    """``xxh3:`` and the XXH3-128 of a file's bytes as hexadecimal digits. Raises ``OSError``."""
    with path.open("rb", buffering=0) as file:
        return f"xxh3:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"


#: A file of at most so many bytes may be nothing but a pointer.
POINTER_BYTES = 1024
#: By the tool that brings what they point to, such files, and targets of links.
_POINTERS = {
    "git lfs pull": re.compile(
        rb"version https://git-lfs\.github\.com/spec/v1\r?\n([\w.-]+ \S+\r?\n)*size \d+\s*"
    ),
    "git annex get": re.compile(rb"\S*/annex/objects/\S+\s*"),
}


def pointer_fault(content: bytes) -> str:
    """What to say of a file with such content where it is a pointer; or nothing."""
    bring = _brought_by(content)
    return bring and f"is no data, but a pointer to them in their place: {bring}"


def pointer_fault_at(path: Path) -> str:
    """What to say of what lies at a local path where it is a pointer, or a link that leads nowhere; or nothing, also
    where nothing is or it cannot be read."""
    try:
        if path.is_symlink() and not path.exists():
            target = str(path.readlink())
            bring = _brought_by(target.encode()) or "bring it there, or remove the link"
            return f"is a link to {target!r}, where no file is: {bring}"
        is_small = path.is_file() and path.stat().st_size <= POINTER_BYTES
        return pointer_fault(path.read_bytes()) if is_small else ""
    except OSError:
        return ""


def _brought_by(pointer: bytes) -> str:
    command = next((command for command, form in _POINTERS.items() if form.fullmatch(pointer)), "")
    return command and f"bring the data with {command!r} in the folder of the repository"

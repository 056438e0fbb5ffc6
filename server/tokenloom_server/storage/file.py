"""The protocol of a file that readers use, local or remote."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import NamedTuple, Self


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

"""Compressed files, decompressed as they are read: streams, which have no way to a row but past all before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.storage.file import File, Range

#: What names end with, and how Arrow calls what they are compressed by.
CODECS = {".gz": "gzip", ".zst": "zstd"}

#: A file may become so many times as large as it is, and so many bytes beside that. Text becomes ten times as large,
#: and tables of numbers fifty times; what becomes more is made to.
MAX_RATIO = 250
FREE_BYTES = 1 << 26


def codec_of(path: str) -> str | None:
    """What a file is compressed by, as its name says; None where it is not."""
    return next((codec for ending, codec in CODECS.items() if path.lower().endswith(ending)), None)


def ending_of(name: str) -> str:
    """What the name of a file ends with: ``.jsonl``, or ``.jsonl.gz`` where it is compressed."""
    path = Path(name)
    return f"{Path(path.stem).suffix}{path.suffix}" if codec_of(name) is not None else path.suffix


class Decompressed:
    """What a compressed file holds, from its beginning on; several gzip members or zstd frames are one text."""

    def __init__(self, file: File, codec: str) -> None:
        """``file`` stays its opener's to close."""
        self._raw = _Raw(file)
        self._codec = codec
        self._stream: Any = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), codec)
        self._given = 0

    @property
    def read_bytes(self) -> int:
        """How much of the file was needed so far."""
        return self._raw.position

    def read(self, length: int) -> bytes:
        """The next ``length`` bytes, fewer only at the end. Raises ``SourceError`` where the file is damaged, cut off,
        or becomes so large that it was made to."""
        try:
            data: bytes = self._stream.read(length)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{self._raw.name} cannot be decompressed behind byte {self._given} of its content ({error}); it is "
                f"no {self._codec} file, truncated or damaged: write or copy it again"
            ) from None
        self._given += len(data)
        if self._given > FREE_BYTES + MAX_RATIO * self._raw.position:
            raise SourceError(
                f"{self._raw.name}: its first {self._raw.position} bytes become {self._given}, more than {MAX_RATIO} "
                "times as many; decompress it yourself if that is what it is to hold"
            )
        return data


class _Raw:
    """A file as Arrow reads one from its beginning to its end."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.name = file.name
        self.position = 0
        self.closed = False
        file.plan([Range(0, file.size)])

    def read(self, length: int) -> bytes | memoryview:
        data = self._file.read_at(self.position, length)
        self.position += len(data)
        return data

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.position

    def close(self) -> None:
        self.closed = True

"""Compressed files, decompressed as they are read: a row is reached only past all before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources.endings import codec_of
from tokenloom_server.storage.arrow_input import FileStream
from tokenloom_server.storage.file import File, Range

#: A file may become so many times as large as it is, and so many bytes beside that. Text becomes ten times as large,
#: and tables of numbers fifty times; a higher ratio is made on purpose.
MAX_RATIO = 250
FREE_BYTES = 1 << 26

#: Bytes that are decoded at once.
CHUNK_BYTES = 1 << 16

#: Bytes that a decoder of xz may take, which a file says itself: ``xz -9`` needs 65 MiB.
XZ_BYTES = 1 << 28


class _Streams:
    """Compressed streams one after the other, read as one by the decoders of Python's own library."""

    def __init__(self, compressed: FileStream, new_decoder: Callable[[], Any], fault: type[Exception]) -> None:
        """``fault``: what its decoders raise for damaged bytes."""
        self._fault = fault
        self._compressed = compressed
        self._new_decoder = new_decoder
        self._decoder = new_decoder()
        self._is_begun = True
        self._undecoded = b""

    def read(self, length: int) -> bytes:
        """The next ``length`` bytes, fewer only at the end. Raises ``OSError`` for what is damaged or cut off."""
        content = bytearray()
        while len(content) < length:
            if self._decoder.eof:
                self._undecoded, self._decoder = self._decoder.unused_data, self._new_decoder()
                self._is_begun = False
            if not self._undecoded and self._decoder.needs_input:
                self._undecoded = bytes(self._compressed.read(CHUNK_BYTES))
                if not self._undecoded and self._is_begun:
                    raise OSError("it ends within a stream")
                if not self._undecoded:
                    break
            self._is_begun = True
            try:
                content += self._decoder.decompress(self._undecoded, length - len(content))
            except self._fault as error:
                raise OSError(str(error)) from None
            self._undecoded = b""
        return bytes(content)


def _stream(compressed: FileStream, codec: str) -> Any:
    """What decompresses a file: Arrow, but for what it has no decoder of, or one for a single stream alone."""
    if codec == "bz2":
        import bz2

        return _Streams(compressed, bz2.BZ2Decompressor, OSError)
    if codec == "xz":
        import lzma

        return _Streams(compressed, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_BYTES), lzma.LZMAError)
    return pa.CompressedInputStream(compressed.for_arrow(), codec)


class Decompressed:
    """What a compressed file holds, from its beginning on; several members, frames or streams are one text."""

    def __init__(self, file: File, codec: str) -> None:
        """``file`` stays its opener's to close."""
        file.plan([Range(0, file.size)])
        self._name = file.name
        self._compressed = FileStream(file)
        self._codec = codec
        self._stream = _stream(self._compressed, codec)
        self._decompressed_bytes = 0

    @property
    def position(self) -> int:
        """How much of the file was needed so far."""
        return self._compressed.position

    def read(self, length: int) -> bytes:
        """The next ``length`` bytes, fewer only at the end. Raises ``SourceError`` where the file is damaged, cut off,
        or becomes so large that it was made to."""
        try:
            data: bytes = self._stream.read(length)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{self._name} cannot be decompressed after byte {self._decompressed_bytes} of its content ({error}); "
                f"it is no {self._codec} file, truncated or damaged: write or copy it again"
            ) from None
        self._decompressed_bytes += len(data)
        if self._decompressed_bytes > FREE_BYTES + MAX_RATIO * self._compressed.position:
            raise SourceError(
                f"{self._name}: its first {self._compressed.position} bytes become {self._decompressed_bytes}, more "
                f"than {MAX_RATIO} times as many; decompress it yourself if that is what it is to hold"
            )
        return data


def text_stream(file: File, path: str) -> FileStream | Decompressed:
    """A file from its beginning on, decompressed where the name in its path says that it is compressed."""
    codec = codec_of(path)
    return FileStream(file) if codec is None else Decompressed(file, codec)

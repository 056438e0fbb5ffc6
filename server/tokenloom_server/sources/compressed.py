"""Compressed files, decompressed as they are read: a row is reached only past all before it."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources.files import codec_of
from tokenloom_server.storage.arrow_input import FileStream
from tokenloom_server.storage.file import File

#: A file may become so many times as large as it is, and so many bytes beside that. Text becomes ten times as large,
#: and tables of numbers fifty times; a higher ratio is made on purpose.
MAX_RATIO = 250
FREE_BYTES = 1 << 26

#: Bytes that are decoded at once.
CHUNK_BYTES = 1 << 16

#: The environment's name for the MiB of memory that a decoder may take, of which a file says itself how many it needs.
MEMORY = "TOKENLOOM_DECOMPRESS_MIB"
#: As zstd itself allows for its window, unless it is asked for more; and of xz, whose ``-9`` needs 65.
_ZSTD_MIB, _XZ_MIB = 128, 256

#: What zlib and zstd say where all is decoded, and the checksum or length after it differs; bz2 and xz do not tell.
_CHECKSUM = re.compile("incorrect (data|length) check|match checksum")


class _Codec(NamedTuple):
    """A way of Python's own library to decode one stream, of which a file may have several."""

    new_decoder: Callable[[], Any]
    fault: type[Exception]
    """What a decoder raises for damaged bytes."""
    heads: bytes
    """With which byte a stream begins."""
    padding: int = 0
    """So many zeros, or a multiple of that, may follow a stream; 0: none."""


class _NoStream(OSError):
    """What follows a stream is no other one."""


class _Streams:
    """Compressed streams one after the other, read as one."""

    def __init__(self, compressed: FileStream, codec: _Codec) -> None:
        self._compressed = compressed
        self._codec = codec
        self._decoder = codec.new_decoder()
        self._zeros = 0
        self._is_begun = True
        self._undecoded = b""
        #: Bytes that were decoded so far.
        self.position = 0

    def read(self, length: int) -> bytes:
        """The next ``length`` bytes, fewer only at the end. Raises ``OSError`` for what is damaged or cut off."""
        parts, end = list[bytes](), self.position + length
        while self.position < end:
            if self._decoder.eof:
                self._undecoded, self._decoder = (
                    self._decoder.unused_data,
                    self._codec.new_decoder(),
                )
                self._is_begun, self._zeros = False, 0
            if not self._undecoded and self._decoder.needs_input:
                self._undecoded = bytes(self._compressed.read(CHUNK_BYTES))
                if not self._undecoded and self._is_begun:
                    raise OSError("it ends within a stream")
                if not self._undecoded:
                    self._check_padding()
                    break
            if not self._is_begun and not self._begin():
                continue
            try:
                parts.append(self._decoder.decompress(self._undecoded, end - self.position))
            except self._codec.fault as error:
                raise OSError(str(error)) from None
            self.position += len(parts[-1])
            self._undecoded = b""
        return b"".join(parts)

    def _begin(self) -> bool:
        """Goes past the zeros after a stream; whether another one begins in what was read."""
        if self._codec.padding:
            begun = self._undecoded.lstrip(b"\0")
            self._zeros += len(self._undecoded) - len(begun)
            self._undecoded = begun
        self._is_begun = bool(self._undecoded)
        if self._is_begun:
            self._check_padding()
            if self._undecoded[0] not in self._codec.heads:
                raise _NoStream(f"found {self._undecoded[:8]!r}")
        return self._is_begun

    def _check_padding(self) -> None:
        if self._zeros and self._zeros % self._codec.padding:
            raise _NoStream(f"{self._zeros} zeros, expected a multiple of {self._codec.padding}")


class _GzipDecoder:
    """Decodes one member of gzip, with what the decoders of bz2, lzma and zstd have."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._decoder.unconsumed_tail

    def decompress(self, data: bytes, length: int) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, length)


def _stream(compressed: FileStream, codec: str) -> Any:
    """What decompresses a file: Python's own library, and Arrow where that has no decoder."""
    if codec == "gzip":
        return _Streams(compressed, _Codec(_GzipDecoder, zlib.error, b"\x1f", padding=1))
    if codec == "zstd":
        zstd = _zstd()
        options = {
            zstd.DecompressionParameter.window_log_max: min(
                _memory_bytes(_ZSTD_MIB).bit_length() - 1, 31
            )
        }
        new_decoder = partial(zstd.ZstdDecompressor, options=options)
        # With or without content.
        return _Streams(compressed, _Codec(new_decoder, zstd.ZstdError, b"\x28PQRSTUVWXYZ[\\]^_"))
    if codec == "bz2":
        import bz2

        return _Streams(compressed, _Codec(bz2.BZ2Decompressor, OSError, b"B"))
    if codec == "xz":
        import lzma

        new_decoder = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, _memory_bytes(_XZ_MIB))
        return _Streams(compressed, _Codec(new_decoder, lzma.LZMAError, b"\xfd", padding=4))
    return pa.CompressedInputStream(compressed.for_arrow(), codec)


def _zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _memory_bytes(usual_mib: int) -> int:
    text = os.environ.get(MEMORY, "0")
    if not re.fullmatch(r"\d{1,5}", text):
        raise ConfigError(f"{MEMORY}: found {text!r}, expected a whole number of MiB, such as 2048")
    return max(usual_mib, int(text)) << 20


class Decompressed:
    """What a compressed file holds, from its beginning on; several members, frames or streams are one text."""

    def __init__(self, file: File, codec: str) -> None:
        """``file`` stays its opener's to close, and to have read ahead."""
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
            raise SourceError(f"{self._name} {self._fault(error)}") from None
        self._decompressed_bytes += len(data)
        if self._decompressed_bytes > FREE_BYTES + MAX_RATIO * self._compressed.position:
            raise SourceError(
                f"{self._name}: its first {self._compressed.position} bytes become {self._decompressed_bytes}, more "
                f"than {MAX_RATIO} times as many; decompress it yourself if that is what it is to hold"
            )
        return data

    def _fault(self, error: Exception) -> str:
        position = getattr(self._stream, "position", self._decompressed_bytes)
        if isinstance(error, _NoStream):
            return (
                f"is whole up to byte {position} of its content, but what stands after that is no {self._codec} "
                f"({error}); cut it off, or write or copy the file again"
            )
        if _CHECKSUM.search(str(error)):
            return f"was decompressed, but its checksum is not that of its content ({error}): write or copy it again"
        remedy = f"it is no {self._codec} file, truncated or damaged: write or copy it again"
        if "memory" in str(error).lower():
            remedy = (
                f"to decode it takes more memory than is allowed: set {MEMORY}=2048, the most for zstd, "
                "or compress it with a smaller window (zstd --long=27, xz -9)"
            )
        # What a decoder made before it failed is lost, so the place is not known.
        return f"cannot be decompressed somewhere after byte {position} of its content ({error}); {remedy}"


def text_stream(file: File, path: str) -> FileStream | Decompressed:
    """A file from its beginning on, decompressed where the name in its path says that it is compressed."""
    codec = codec_of(path)
    return FileStream(file) if codec is None else Decompressed(file, codec)

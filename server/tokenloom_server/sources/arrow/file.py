"""An opened Arrow IPC file: mapped where it is local, read range by range where it is remote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from tokenloom_server.sources.arrow import headers
from tokenloom_server.sources.base import TensorFile
from tokenloom_server.storage.arrow_input import for_arrow
from tokenloom_server.storage.file import File, LocalFile


class ArrowFile(NamedTuple):
    """``reader``: a ``RecordBatchFileReader`` of the file format (with a footer), else a ``RecordBatchStreamReader``.

    ``stream`` is what the reader reads; a mapped one stays mapped while an array that came from it is alive.
    """

    file: File
    stream: Any
    reader: Any
    is_file_format: bool

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema

    def batch(self, number: int, offset: int) -> pa.RecordBatch:
        """The ``number``-th record batch, which lies at the byte ``offset`` and can be read by itself."""
        if self.is_file_format:
            return self.reader.get_batch(number)
        self.stream.seek(offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(self.stream), self.schema)


def open_arrow(file: File) -> ArrowFile:
    """Opens a file; a local one is closed, since its mapping stays. Raises what Arrow raises."""
    if isinstance(file, LocalFile):
        file.close()
        stream = pa.BufferReader(_mapped(file.path))
    else:
        stream = for_arrow(file)
    has_footer = headers.is_file_format(memoryview(stream.read_buffer(8)))
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if has_footer else pa.ipc.open_stream(stream)
    return ArrowFile(file, stream, reader, has_footer)


def _mapped(path: str) -> Any:
    """A file as memory. It needs no descriptor, and the kernel fetches what is looked at and not all of it."""
    with pa.memory_map(path) as file:
        begin = file.read_buffer(8)
        return pa.foreign_buffer(begin.address, file.size(), begin)


def open_tensors(file: File) -> TensorFile:
    """Opens a file whose parts are its record batches. Raises ``ValueError`` for one that has no way to a batch but
    past all before it, unless all of it can be held."""
    batches, compressed, is_local = (
        headers.scan(file),
        headers.is_compressed(file),
        isinstance(file, LocalFile),
    )
    opened = open_arrow(file)
    if opened.is_file_format or batches.plain or compressed:
        has_dictionaries = any(pa.types.is_dictionary(field.type) for field in opened.schema)
        if not opened.is_file_format and not batches.plain and has_dictionaries:
            raise ValueError(
                "a compressed stream with dictionaries is read from its begin only; write it uncompressed"
            )
        return _Batches(opened, batches, mapped=is_local and not compressed)
    if not is_local:
        raise ValueError(
            "a stream with dictionaries is read from its begin only; keep it locally, or write parquet"
        )
    return _Batches(opened, batches, mapped=True, held=list(opened.reader))


class _Batches:
    """Implements ``TensorFile``: batches are read one by one. Those of a stream with dictionaries, which stand before
    the batches that need them, are ``held``: it is followed once, and they are mapped."""

    def __init__(
        self,
        opened: ArrowFile,
        batches: headers.Batches,
        *,
        mapped: bool,
        held: Sequence[Any] | None = None,
    ) -> None:
        self._opened = opened
        self._offsets = batches.offsets
        self._held = held
        self.schema = opened.schema
        self.ends: npt.NDArray[np.int64] = batches.ends
        self.mapped = mapped
        self.decoded_bytes = opened.file.size

    def read(self, part: int, names: Sequence[str]) -> list[pa.Array]:
        batch = (
            self._held[part]
            if self._held is not None
            else self._opened.batch(part, self._offsets[part])
        )
        return [batch.column(name) for name in names]

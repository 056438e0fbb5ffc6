"""Record batches of Arrow files as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from tokenloom_server.sources.arrow import headers
from tokenloom_server.sources.arrow.file import ArrowFile, open_arrow
from tokenloom_server.sources.tensors.file import TensorFile
from tokenloom_server.storage.file import File
from tokenloom_server.storage.local import LocalFile


def open_tensors(file: File) -> TensorFile:
    """Opens a file whose parts are its record batches. Raises ``ValueError`` for one that has no way to a batch but
    past all before it, unless all of it can be held."""
    batches, compressed, is_local = headers.scan(file), headers.is_compressed(file), isinstance(file, LocalFile)
    opened = open_arrow(file)
    if opened.is_file_format or batches.plain or compressed:
        has_dictionaries = any(pa.types.is_dictionary(field.type) for field in opened.schema)
        if not opened.is_file_format and not batches.plain and has_dictionaries:
            raise ValueError("a compressed stream with dictionaries is read from its begin only; write it uncompressed")
        return _Batches(opened, batches, mapped=is_local and not compressed)
    if not is_local:
        raise ValueError("a stream with dictionaries is read from its begin only; keep it locally, or write parquet")
    return _WholeStream(opened, batches.ends)


class _Batches:
    """Implements ``TensorFile``: batches are read one by one."""

    def __init__(self, opened: ArrowFile, batches: headers.Batches, *, mapped: bool) -> None:
        self._opened = opened
        self._offsets = batches.offsets
        self.schema = opened.schema
        self.ends: npt.NDArray[np.int64] = batches.ends
        self.mapped = mapped
        self.decoded_bytes = opened.file.size

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        if self._opened.is_file_format:
            batch = self._opened.reader.get_batch(part)
        else:
            stream = self._opened.stream
            stream.seek(self._offsets[part])
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), self.schema)
        return [batch.column(name) for name in names]


class _WholeStream:
    """Implements ``TensorFile``: a stream with dictionaries, which stand before the batches that need them, so that it
    is followed once; its batches are mapped."""

    mapped = True

    def __init__(self, opened: ArrowFile, ends: npt.NDArray[np.int64]) -> None:
        self._batches = list(opened.reader)
        self.schema = opened.schema
        self.ends = ends
        self.decoded_bytes = opened.file.size

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        return [self._batches[part].column(name) for name in names]

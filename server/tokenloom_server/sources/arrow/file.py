"""An opened Arrow IPC file: mapped where it is local, read range by range where it is remote."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.ipc

from tokenloom_server.sources.arrow.headers import is_file_format
from tokenloom_server.storage.arrow_input import for_arrow
from tokenloom_server.storage.file import File
from tokenloom_server.storage.local import LocalFile


class ArrowFile(NamedTuple):
    """``reader``: a ``RecordBatchFileReader`` of the file format (with a footer), else a ``RecordBatchStreamReader``.

    ``stream`` is what the reader reads; a mapped one stays mapped while an array that came from it is alive.
    """

    file: File
    stream: Any
    reader: Any
    is_file_format: bool

    @property
    def schema(self) -> Any:
        return self.reader.schema


def open_arrow(file: File) -> ArrowFile:
    """Opens a file; a local one is closed, since its mapping stays. Raises what Arrow raises."""
    if isinstance(file, LocalFile):
        file.close()
        stream = pa.memory_map(str(file.path))
    else:
        stream = for_arrow(file)
    has_footer = is_file_format(memoryview(stream.read_buffer(8)))
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if has_footer else pa.ipc.open_stream(stream)
    return ArrowFile(file, stream, reader, has_footer)

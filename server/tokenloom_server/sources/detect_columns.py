"""A glimpse of a file: its columns and what each holds, before anybody has said what is to be read of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrow_headers
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.columns import content_of
from tokenloom_server.sources.compressed import Decompressed, codec_of
from tokenloom_server.storage.arrow_input import for_arrow
from tokenloom_server.storage.file import File
from tokenloom_server.storage.open import open_file
from tokenloom_server.storage.urls import is_remote

#: JSON lines are looked at until each key had a value, and so many at most; a longer line is not looked at.
PROBE_LINES = 64
PROBE_LINE_BYTES = 16 * 2**20
#: Bytes of them that are read at once.
READ_BYTES = 2**16


def columns_of(scheme: str, path: str, base_dir: Path) -> Mapping[str, Content | None]:
    """Names in the order of a file, by its path or URL; None for what is neither text nor lists of integers.

    Raises ``SourceError`` naming a file that cannot be read as one of the scheme.
    """
    shown = path if is_remote(path) else str(base_dir / path)
    try:
        if scheme == "txt":
            return {"text": Content.TEXT}
        if scheme in ("megatron", "npy"):
            return {"ids": Content.IDS}
        with open_file(path, base_dir) as file:
            if scheme == "jsonl":
                return _keys(file, codec_of(path))
            return {field.name: content_of(field.type) for field in _schema(scheme, file)}
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{shown!r} cannot be read as {scheme} ({type(error).__name__}: {error})") from None


def _schema(scheme: str, file: File) -> Any:
    if scheme == "parquet":
        return pq.read_schema(for_arrow(file))
    stream = for_arrow(file)
    stream = pa.memory_map(stream) if isinstance(stream, str) else stream
    is_file = arrow_headers.is_file_format(memoryview(stream.read_buffer(8)))
    stream.seek(0)
    return pa.ipc.open_file(stream).schema if is_file else pa.ipc.open_stream(stream).schema


def _keys(file: File, codec: str | None) -> dict[str, Content | None]:
    found: dict[str, Content | None] = {}
    undecided: set[str] = set()
    for document in _documents(file, codec):
        for key, value in document.items():
            if value is None and key not in found:
                undecided.add(key)
            if key not in found or key in undecided:
                found[key] = _content_of_value(value)
            if value is not None:
                undecided.discard(key)
        if not undecided:
            break
    return found


def _documents(file: File, codec: str | None) -> Iterator[dict[str, Any]]:
    for line in itertools.islice(_lines(file, codec), PROBE_LINES):
        document = json.loads(line)
        if not isinstance(document, dict):
            raise ValueError("expected a JSON object on each line")
        yield document


def _lines(file: File, codec: str | None) -> Iterator[bytes]:
    """A file's lines, up to one that is longer than ``PROBE_LINE_BYTES``: of that one, a part."""
    held, offset, wanted = b"", 0, READ_BYTES
    stream = Decompressed(file, codec) if codec is not None else None
    while data := stream.read(wanted) if stream is not None else bytes(file.read_at(offset, wanted)):
        offset += len(data)
        *lines, held = (held + data).split(b"\n")
        yield from lines
        if len(held) >= PROBE_LINE_BYTES:
            break
        wanted = max(READ_BYTES, len(held))
    if held:
        yield held


def _content_of_value(value: Any) -> Content | None:
    if isinstance(value, str):
        return Content.TEXT
    if isinstance(value, list) and all(type(item) is int for item in value):
        return Content.IDS
    return None

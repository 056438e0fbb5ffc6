"""A glimpse of a file: its columns and what each holds, before anybody has said what is to be read of it."""

from __future__ import annotations

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

#: JSON lines are looked at until each key had a value, and so many at most; a longer line is not looked at.
PROBE_LINES = 64
PROBE_LINE_BYTES = 16 * 2**20


def columns_of(scheme: str, path: Path) -> Mapping[str, Content | None]:
    """Names in the file's order; None for what is neither text nor lists of integers.

    Raises ``SourceError`` naming a file that cannot be read as one of the scheme.
    """
    try:
        if scheme == "txt":
            return {"text": Content.TEXT}
        if scheme in ("megatron", "npy"):
            return {"ids": Content.IDS}
        if scheme == "jsonl":
            return _keys(path)
        return {field.name: content_of(field.type) for field in _schema(scheme, path)}
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{str(path)!r} cannot be read as {scheme} ({type(error).__name__}: {error})") from None


def _schema(scheme: str, path: Path) -> Any:
    if scheme == "parquet":
        return pq.read_schema(path)
    mapped = pa.memory_map(str(path))
    is_file = arrow_headers.is_file_format(memoryview(mapped.read_buffer(8)))
    mapped.seek(0)
    return pa.ipc.open_file(mapped).schema if is_file else pa.ipc.open_stream(mapped).schema


def _keys(path: Path) -> dict[str, Content | None]:
    found: dict[str, Content | None] = {}
    undecided: set[str] = set()
    for document in _documents(path):
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


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for _ in range(PROBE_LINES):
            line = file.readline(PROBE_LINE_BYTES)
            if not line:
                return
            document = json.loads(line)
            if not isinstance(document, dict):
                raise ValueError("expected a JSON object on each line")
            yield document


def _content_of_value(value: Any) -> Content | None:
    if isinstance(value, str):
        return Content.TEXT
    if isinstance(value, list) and all(type(item) is int for item in value):
        return Content.IDS
    return None

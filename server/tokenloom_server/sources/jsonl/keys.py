"""The keys of a file of JSON lines, and what their values hold, by its first lines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from tokenloom_server.sources.base import Content
from tokenloom_server.sources.compressed import Decompressed
from tokenloom_server.sources.endings import codec_of
from tokenloom_server.storage.file import File

#: Lines are looked at until each key had a value, and so many at most; a longer line is not looked at.
PROBE_LINES = 64
PROBE_LINE_BYTES = 16 * 2**20
#: Bytes of them that are read at once.
READ_BYTES = 2**16


def columns_of(file: File, path: str) -> dict[str, Content | None]:
    """The keys of the first objects, in the order in which they occur."""
    contents: dict[str, Content | None] = {}
    undecided: set[str] = set()
    for document in _documents(file, codec_of(path)):
        for key, value in document.items():
            if value is None and key not in contents:
                undecided.add(key)
            if key not in contents or key in undecided:
                contents[key] = _content_of_value(value)
            if value is not None:
                undecided.discard(key)
        if not undecided:
            break
    return contents


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

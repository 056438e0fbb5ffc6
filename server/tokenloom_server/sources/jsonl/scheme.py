"""``jsonl:GLOB:COLUMN``: JSON lines, one object per line, whose COLUMN is a string or a list of integers."""

from __future__ import annotations

from collections.abc import Mapping

from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage.file import File


class JsonlScheme(Scheme):
    """Files of JSON objects."""

    name = "jsonl"
    usage = "jsonl:GLOB:COLUMN"
    endings = (".jsonl", ".ndjson", ".json")
    may_be_compressed = True
    has_blank_lines = True

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.jsonl.reader import open_jsonl

        return open_jsonl(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        from tokenloom_server.sources.jsonl.probe import columns_of

        return columns_of(file, path)

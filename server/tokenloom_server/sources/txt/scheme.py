"""``txt:GLOB:text``: plain text, one row per line; ``txt:GLOB:paragraph`` and ``txt:GLOB:file``: larger rows."""

from __future__ import annotations

from collections.abc import Mapping

from tokenloom_server.errors import ConfigError
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage.file import File

COLUMN = "text"
#: What a spec may name instead of the column: what a row is, where it is no line.
PARAGRAPH, FILE = "paragraph", "file"


class TxtScheme(Scheme):
    """Files of text, whose lines are the rows, or whose paragraphs are, or each of which is one."""

    name = "txt"
    usage = "txt:GLOB:text"
    has_columns = False
    endings = (".txt",)
    may_be_compressed = True

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        if column not in (COLUMN, PARAGRAPH, FILE):
            raise ConfigError(
                f"a txt source has one column, {COLUMN!r}, but {column!r} was asked for; where a row is no line, name "
                f"{PARAGRAPH!r} or {FILE!r} instead"
            )
        return location, column

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.lines import LinesSource, require_rows
        from tokenloom_server.sources.txt.reader import decode
        from tokenloom_server.sources.txt.units import UnitsSource, file_ends, paragraph_ends

        require_rows(request)
        if request.spec.column == PARAGRAPH:
            return UnitsSource(request, paragraph_ends, "\r\n")
        if request.spec.column == FILE:
            return UnitsSource(request, file_ends, "")
        return LinesSource(request, Content.TEXT, decode)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return {COLUMN: Content.TEXT}

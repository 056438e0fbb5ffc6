"""``txt:GLOB:text``: plain text, one row per line."""

from __future__ import annotations

from collections.abc import Mapping

from tokenloom_server.errors import ConfigError
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage.file import File

COLUMN = "text"


class TxtScheme(Scheme):
    """Files of lines, which are the rows."""

    name = "txt"
    usage = "txt:GLOB:text"
    has_columns = False
    endings = (".txt",)
    may_be_compressed = True

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        if column != COLUMN:
            raise ConfigError(f"a txt source has one column, {COLUMN!r}, but {column!r} was asked for")
        return location, column

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.lines import LinesSource, require_rows
        from tokenloom_server.sources.txt.reader import decode

        require_rows(request)
        return LinesSource(request, Content.TEXT, decode)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return {COLUMN: Content.TEXT}

"""``npy:GLOB``: flat arrays of ids, in which an end-of-text id ends each document.

Files of numpy and of llm.c say their type themselves; where a file is bare ids, the spec has it: ``npy:GLOB:uint16``.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.id_specs import IDS, RAW_TYPES, parse_ids, write_ids
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage.file import File


class NpyScheme(Scheme):
    """Mapped files of ids; a row is a document with its end-of-text id."""

    name = "npy"
    usage = "npy:GLOB"
    has_columns = False
    ends_documents = True
    splits_at_end_of_text = True
    endings = (".npy",)
    refuses_urls = "files of npy: are mapped"

    def parse(self, text: str) -> tuple[str, str]:
        return parse_ids(text, (IDS, *RAW_TYPES), self.usage)

    def write(self, location: str, column: str) -> str:
        return write_ids(location, column)

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.npy.reader import NpySource

        return NpySource(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return {IDS: Content.IDS}

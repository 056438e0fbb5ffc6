"""``npy:GLOB``: flat arrays of ids, in which an end-of-text id ends each document.

Files of numpy and of llm.c say their type themselves; where a file is bare ids, the spec has it: ``npy:GLOB:uint16``.
"""

from __future__ import annotations

from tokenloom_server.sources.base import Source
from tokenloom_server.sources.id_scheme import RAW_TYPES, IdScheme
from tokenloom_server.sources.scheme import ReadRequest


class NpyScheme(IdScheme):
    """Mapped files of ids; a row is a document with its end-of-text id."""

    name = "npy"
    usage = "npy:GLOB"
    splits_at_end_of_text = True
    endings = (".npy",)
    refuses_urls = "files of npy: are mapped"
    raw_types = RAW_TYPES

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.npy.reader import NpySource

        return NpySource(request)

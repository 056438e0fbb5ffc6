"""``litdata:DIR[:FIELD]``: the chunks that LitData's ``optimize`` wrote into a folder."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_server.sources.base import Source
from tokenloom_server.sources.indexed_folder import Index, IndexedFolderScheme, ListedFile
from tokenloom_server.sources.litdata.index import ITEM, LitdataIndex
from tokenloom_server.sources.scheme import ReadRequest


class LitdataScheme(IndexedFolderScheme):
    """Files of samples; a row is a sample."""

    name = "litdata"
    usage = "litdata:DIR[:FIELD]"
    ends_documents = True
    index = LitdataIndex

    def parse(self, text: str) -> tuple[str, str]:
        """``DIR`` or ``DIR:FIELD``; a colon before a slash is that of a URL."""
        before, _, field = text.rpartition(":")
        return super().parse(text if before and "/" not in field else f"{text}:{ITEM}")

    def write(self, location: str, column: str) -> str:
        return location if column == ITEM else f"{location}:{column}"

    def open_files(
        self, request: ReadRequest, index: Index, listed: Sequence[ListedFile]
    ) -> Source:
        from tokenloom_server.sources.litdata.reader import open_chunks

        assert isinstance(index, LitdataIndex), "the index is this scheme's"
        return open_chunks(request, index, listed)

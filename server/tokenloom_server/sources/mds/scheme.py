"""``mds:DIR:FIELD``: the shards that Mosaic streaming's ``MDSWriter`` wrote into a folder.

Where a field is of bytes, or of arrays of any type, the spec says of which type its ids are: ``mds:DIR:FIELD:uint16``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_server.sources.base import Source
from tokenloom_server.sources.indexed_folder import Index, IndexedFolderScheme, ListedFile
from tokenloom_server.sources.mds.index import ID_TYPES, MdsIndex
from tokenloom_server.sources.scheme import ReadRequest


class MdsScheme(IndexedFolderScheme):
    """Files of samples, raw or compressed; a row is a sample."""

    name = "mds"
    usage = "mds:DIR:FIELD"
    endings = (".mds",)
    index = MdsIndex

    def parse(self, text: str) -> tuple[str, str]:
        location, column = super().parse(text)
        before, _, field = location.rpartition(":")
        # A colon before a slash is that of a URL.
        if column in ID_TYPES and before and field and "/" not in field:
            return before, f"{field}:{column}"
        return location, column

    def open_files(
        self, request: ReadRequest, index: Index, listed: Sequence[ListedFile]
    ) -> Source:
        from tokenloom_server.sources.mds.reader import MdsSource

        return MdsSource(request, listed)

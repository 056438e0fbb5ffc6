"""What schemes share whose files hold nothing but ids: the column need not be named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tokenloom_server.errors import ConfigError
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.scheme import Scheme
from tokenloom_server.storage.file import File

#: The column of sources that have nothing but ids.
IDS = "ids"
#: Types of ids in files that do not say it themselves.
RAW_TYPES = ("uint16", "uint32", "int32")


class IdScheme(Scheme):
    """Mapped files of ids, whose one column is ``IDS``."""

    has_columns = False
    ends_documents = True
    raw_types: ClassVar[tuple[str, ...]] = ()
    """Those of ``RAW_TYPES`` that a spec may name instead of the column."""

    def parse(self, text: str) -> tuple[str, str]:
        """``LOCATION`` or ``LOCATION:COLUMN``; a colon before anything else is the location's."""
        location, colon, column = text.rpartition(":")
        if not colon or column not in (IDS, *self.raw_types):
            location, column = text, IDS
        if not location:
            raise ConfigError(f"expected {self.usage}, with no part empty")
        return location, column

    def write(self, location: str, column: str) -> str:
        return location if column == IDS else f"{location}:{column}"

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        return {IDS: Content.IDS}

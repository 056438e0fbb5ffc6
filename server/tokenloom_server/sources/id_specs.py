"""Specs of schemes whose files hold nothing but ids: the column need not be named."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_server.errors import ConfigError

#: The column of sources that have nothing but ids.
IDS = "ids"
#: Instead of it, the type of the ids of files that do not say it themselves.
RAW_TYPES = ("uint16", "uint32", "int32")


def parse_ids(text: str, columns: Sequence[str], usage: str) -> tuple[str, str]:
    """Location and column of ``LOCATION`` or ``LOCATION:COLUMN``; a colon before anything else is the location's."""
    location, colon, column = text.rpartition(":")
    if not colon or column not in columns:
        location, column = text, IDS
    if not location:
        raise ConfigError(f"expected {usage}, with no part empty")
    return location, column


def write_ids(location: str, column: str) -> str:
    """What ``parse_ids`` reads."""
    return location if column == IDS else f"{location}:{column}"

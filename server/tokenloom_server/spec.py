"""The spec: the string that names a source, ``scheme:location:column``."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom_server.errors import ConfigError
from tokenloom_server.storage.urls import is_remote, redacted, refuse_unsafe

SCHEMES = {
    "parquet": "parquet:GLOB:COLUMN",
    "jsonl": "jsonl:GLOB:COLUMN",
    "txt": "txt:GLOB:text",
    "arrow": "arrow:DIR:COLUMN",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed spec.

    ``location`` may contain colons (a URL, a drive letter): the scheme ends at the first colon and
    the column begins after the last.
    """

    scheme: str
    location: str
    column: str

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Raises ``ConfigError`` when the scheme is unknown or a part is missing."""
        scheme, colon, rest = text.partition(":")
        text = redacted(text)
        if not colon or scheme not in SCHEMES:
            known = ", ".join(SCHEMES.values())
            raise ConfigError(f"source {text!r}: the scheme is {scheme!r}, expected one of {known}")
        location, colon, column = rest.rpartition(":")
        if not colon or not location or not column:
            raise ConfigError(f"source {text!r}: expected {SCHEMES[scheme]}, with no part empty")
        if scheme == "txt" and column != "text":
            raise ConfigError(f"source {text!r}: a txt source has one column, 'text', but {column!r} was asked for")
        if is_remote(location):
            refuse_unsafe(f"source {text!r}", location)
        return cls(scheme, location, column)

    def __str__(self) -> str:
        return f"{self.scheme}:{self.location}:{self.column}"

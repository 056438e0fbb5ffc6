"""The spec of a source, ``scheme:location:column``, and what a mixture file has to know of its scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenloom_server.storage.urls import is_remote


class SpecScheme(Protocol):
    """What may a mixture file say of a source of this scheme? ``sources`` answers."""

    @property
    def name(self) -> str:
        """What a spec begins with."""

    @property
    def has_columns(self) -> bool:
        """Whether a row has columns beside the one that is read, for ``filter``, ``template`` and ``loss_mask``."""

    @property
    def ends_documents(self) -> bool:
        """Whether documents as a rule end with their end-of-text id already."""

    @property
    def gives_samples(self) -> bool:
        """Whether rows were cut to samples already, and get no begin- or end-of-text id."""

    @property
    def reads_any_row(self) -> bool:
        """Whether rows can be read in any order, as ``batching`` does."""

    @property
    def has_commits(self) -> bool:
        """Whether a location has commits, of which a run may name the one that it begins with."""

    @property
    def has_blank_lines(self) -> bool:
        """Whether a line may be blank, so that ``on_blank_line`` says what becomes of it."""

    def write(self, location: str, column: str) -> str:
        """The spec's text after ``scheme:``."""

    def place(self, location: str) -> str:
        """Where the files lie: a path, a pattern or a URL."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed spec.

    ``location`` may contain colons: a URL, a drive letter, the split of a repository. A scheme without columns of its
    own gives its one column a name.
    """

    scheme: SpecScheme
    location: str
    column: str
    commit: str | None = None
    """On the Hub, the commit at which files are looked up. No part of the spec's text."""

    @property
    def place(self) -> str:
        """Where the files lie: a path, a pattern or a URL."""
        return self.scheme.place(self.location)

    @property
    def is_remote(self) -> bool:
        """Whether the files lie beyond a network."""
        return is_remote(self.place)

    def __str__(self) -> str:
        return f"{self.scheme.name}:{self.scheme.write(self.location, self.column)}"

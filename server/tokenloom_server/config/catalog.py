"""What a mixture file is read against: the source schemes and the policies that there are.

The entry point makes one ``Catalog`` and hands it to ``load``; every config keeps the one that it was read against.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenloom_server.storage.urls import is_remote

# The spec of a source, ``scheme:location:column``, and what a mixture file has to know of its scheme.


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


#: As in the mixture file: a number, or [tokens, weight] points.
FileWeight = float | list[tuple[int, float]]


class PolicyRules(Protocol):
    """What may a mixture file say of a node under this policy? ``mixing`` answers."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Collection[str]:
        """The fields of a node that have a meaning under this policy alone."""

    @property
    def estimates(self) -> bool:
        """Whether weights follow from what the sources below have left, so that these must have an end."""

    def check(self, weights: Sequence[FileWeight], options: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for weights of the children, in the file's order, that mean nothing."""


class SourceSchemes(Protocol):
    """Which source schemes are there? ``sources`` answers."""

    def spec(self, text: str) -> Spec:
        """A parsed spec. Raises ``ConfigError`` for an unknown scheme, and for a text that its scheme refuses."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """All that mixture files can name and the packages above answer for; ``policies`` by name, in the order in which
    errors list them."""

    sources: SourceSchemes
    policies: Mapping[str, PolicyRules]
    transforms: Collection[str] = ()
    """The users' functions, each ``MODULE:FUNCTION``, that whoever starts the process allows."""


def catalog_of(context: Any) -> Catalog:
    """The catalog in a validation's context."""
    if not isinstance(context, Catalog):
        raise TypeError(
            "a mixture is read against a catalog: model_validate(document, context=catalog)"
        )
    return context

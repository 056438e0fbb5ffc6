"""What a mixture file is read against: the source schemes and the policies that there are.

The entry point makes one ``Catalog`` and hands it to ``load``; every config keeps the one that it was read against.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenloom_server.config.spec import Spec

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

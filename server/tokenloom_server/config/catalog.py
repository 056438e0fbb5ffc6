"""What a mixture file is read against: the source schemes that there are.

The entry point makes one ``Catalog`` and hands it to ``load``; every config keeps the one that it was read against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tokenloom_server.config.spec import Spec


class SourceSchemes(Protocol):
    """Which source schemes are there? ``sources`` answers."""

    def spec(self, text: str) -> Spec:
        """A parsed spec. Raises ``ConfigError`` for an unknown scheme, and for a text that its scheme refuses."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """All that mixture files can name and the packages above answer for."""

    sources: SourceSchemes


def catalog_of(context: Any) -> Catalog:
    """The catalog in a validation's context."""
    if not isinstance(context, Catalog):
        raise TypeError("a mixture is read against a catalog: model_validate(document, context=catalog)")
    return context

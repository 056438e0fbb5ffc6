"""``streams``: samples beside training, to evaluate on."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from tokenloom_server.config.base import STREAM_NAME, Section
from tokenloom_server.config.node import NodeConfig, numbered

TRAIN = "train"
"""The stream that is trained on."""
VALIDATION = "validation"
"""The stream of what sources hold out, which exists wherever one does."""

StreamName = Annotated[str, Field(pattern=STREAM_NAME)]


class StreamConfig(Section):
    """A stream beside training: samples to evaluate on, the same ones each time."""

    mixture: NodeConfig | None = None
    """What it is made of; by default the documents that training's sources hold out."""

    @model_validator(mode="after")
    def _number_children(self) -> Self:
        if self.mixture is not None and self.mixture.id < 0:
            object.__setattr__(self, "mixture", numbered(self.mixture))
        return self


def empty_as_mapping(value: object) -> object:
    """Reads ``validation:`` alone as a stream without fields."""
    return {} if value is None else value


Streams = dict[StreamName, Annotated[StreamConfig, BeforeValidator(empty_as_mapping)]]


def with_training_on_top(document: dict[str, object]) -> dict[str, object]:
    """A document of a run in which training stands at the top, not among the streams. Raises ``ValueError``."""
    streams = document.get("streams")
    if not isinstance(streams, dict) or TRAIN not in streams:
        return document
    train = streams[TRAIN]
    if "mixture" in document:
        raise ValueError(
            f"streams.{TRAIN}: found a mixture at the top already; give training one of the two"
        )
    if not isinstance(train, dict) or set(train) != {"mixture"}:
        raise ValueError(f"streams.{TRAIN}: expected a mapping with mixture, found {train!r}")
    others = {name: stream for name, stream in streams.items() if name != TRAIN}
    return {**document, "mixture": train["mixture"], "streams": others}

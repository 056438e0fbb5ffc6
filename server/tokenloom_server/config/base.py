"""The base of every section of the mixture file, and the types of the values that several sections share."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from tokenloom_server.config.described import Described
from tokenloom_server.core.control_characters import refuse_control_characters


class Section(Described):
    """One section of the mixture file: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


def not_bool(value: object) -> object:
    """Refuses true and false, which pydantic would read as 1 and 0 (YAML reads ``yes`` and ``on`` as true)."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number above 0, but this is {value!r}")
    return value


def whole_number(value: object) -> object:
    """Reads ``1e9`` as an integer: to YAML it is text, and ``1.0e9`` is a float."""
    if isinstance(value, str | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            return value
        if math.isfinite(number) and number.is_integer():
            return int(number)
    return value


def epochs_number(value: object) -> object:
    """Reads ``inf`` beside ``.inf``, and refuses what is no number of epochs."""
    if isinstance(value, bool) or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"epochs is a number above 0 or .inf, but this is {value!r}")
    return math.inf if value == "inf" else value


def _ascending(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    for (previous, _), (tokens, _) in pairwise(points):
        if tokens <= previous:
            raise ValueError(
                f"the point at {tokens} tokens stands after the one at {previous}; expected them ascending"
            )
    if not any(weight for _, weight in points):
        raise ValueError(
            "every point has the weight 0, and the child would never get anything; leave the child out"
        )
    return points


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _weight_number(value: object) -> object:
    if not_bool(value) == 0:
        raise ValueError(
            "a weight is above 0: take the child out of the file, or pause it while the run trains (paused=true of "
            "tokenloom mixture set)"
        )
    return value


def _weight_kind(value: object) -> str:
    return "points" if isinstance(value, list) else "number"


Positive = Annotated[float, Field(gt=0, strict=False), BeforeValidator(_weight_number)]
TokenCount = Annotated[int, Field(ge=0, le=2**53 - 1), BeforeValidator(whole_number)]
RowCount = TokenCount

_Point = Annotated[
    tuple[TokenCount, Annotated[float, Field(ge=0, strict=False), BeforeValidator(not_bool)]],
    BeforeValidator(_as_tuple),
]
Points = Annotated[list[_Point], Field(min_length=1), AfterValidator(_ascending)]
"""Of a ``schedule``: ``[total tokens of the run, weight]``, ascending."""
Weight = Annotated[
    Annotated[Positive, Tag("number")] | Annotated[Points, Tag("points")],
    Discriminator(_weight_kind),
]
Share = Annotated[float, Field(gt=0, lt=1, strict=False), BeforeValidator(not_bool)]
Epochs = Annotated[
    float, Field(gt=0, allow_inf_nan=True, strict=False), BeforeValidator(epochs_number)
]
MaxTokens = Annotated[int, Field(gt=0, le=2**53 - 1), BeforeValidator(whole_number)]
PlainText = Annotated[str, AfterValidator(refuse_control_characters)]
"""On one line, without characters that a terminal obeys."""
Name = Annotated[PlainText, Field(min_length=1, max_length=256)]

RUN_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
STREAM_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_LETTERS = "letters (a to z), digits, dots, underscores and hyphens, with a letter or a digit first"
NAMES_IN_WORDS = {RUN_NAME: f"1 to 128 {_LETTERS}", STREAM_NAME: f"1 to 64 {_LETTERS}"}

Presence = Literal["live", "paused", "dropped"]
"""Whether a child takes part. Only revisions pause and drop; what was dropped stays in the tree with its counters."""
OnExhausted = Literal["drop", "stop"]
EndOfText = Literal[True, False, "auto"]
OnBadRow = Literal["fail", "skip"]

"""The base of models whose fields are described below them, of each section of the mixture file; values of several."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
)

from tokenloom_server.core.control_characters import refuse_control_characters


class Described(BaseModel):
    """In a JSON Schema, the docstrings of fields are their descriptions.

    They are read from the source when a schema is made, and validators are built when they are first used: both take a
    millisecond for each class, at every start of a server (pydantic's ``use_attribute_docstrings`` reads them then).
    """

    model_config = ConfigDict(defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for base in cls.__mro__[: cls.__mro__.index(Described)]:
            for field, text in _docstrings(base):
                if field in properties:
                    properties[field].setdefault("description", text)
        return schema


class Document(Described):
    """What is said of a run, for REST, gRPC and the command line. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def of(cls, known: object, **others: Any) -> Self:
        """A document of ``others``, and of what ``known`` has under the names of the remaining required fields."""
        needed = [
            name
            for name, field in cls.model_fields.items()
            if field.is_required() and name not in others
        ]
        return cls(**others, **{name: getattr(known, name) for name in needed})


def _docstrings(cls: type) -> Iterator[tuple[str, str]]:
    """(field, text) of each field of a class that has a docstring."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(docstring))):
                yield name, inspect.cleandoc(docstring)


# The base of every section of the mixture file, and the types of the values that several sections share.


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

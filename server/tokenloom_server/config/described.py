"""The base of models whose fields are described by the docstrings below them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler


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

"""The faults of a mixture file, a line for each: where it stands, the path of the field, what was found, what was
expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tokenloom_server.config.base import PATTERNS_IN_WORDS

#: Characters of a fault, which quotes what somebody wrote.
MAX_LINE = 2000

_Path = tuple[str | int, ...]


def explain(error: ValidationError, where: str, model: type[BaseModel], field: str = "", text: str = "") -> str:
    """A line for each fault; ``where`` begins it. ``model``: what the document was read as. ``field``: in which the
    document stands. ``text``: its YAML, for lines and columns."""
    begin = f"{where}: " if where else ""
    root = yaml.compose(text, Loader=yaml.CSafeLoader) if text else None
    lines = []
    for fault in error.errors():
        path = _path(fault["loc"])
        named = ".".join(map(str, (field, *path) if field else path))
        line = f"{begin}{_position(root, path)}{named and named + ': '}{_explain(dict(fault), path, model)}"
        lines.append(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…")
    return "\n".join(lines)


def _is_tag(part: str | int, before: str | int) -> bool:
    if isinstance(before, int):
        return part in ("source", "node")
    return before == "weight" and part in ("number", "points")


def _path(location: _Path) -> _Path:
    # The tags of the union are pydantic's own; the user's file has no such level.
    return tuple(part for i, part in enumerate(location) if not (i and _is_tag(part, location[i - 1])))


def _position(node: Any, path: Sequence[str | int]) -> str:
    """Where a field's key stands in the YAML, of a field that is missing the last above it that does not; empty where
    that is not known."""
    mark = None
    for part in path:
        if isinstance(node, yaml.MappingNode):
            key, node = next(((key, value) for key, value in node.value if key.value == part), (None, None))
            mark = key.start_mark if key is not None else mark
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            mark = node.start_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""


def _keys_at(path: _Path, model: type[BaseModel]) -> set[str]:
    """The keys beside the last one of a path."""
    models = {model}
    for part in path[:-1]:
        fields = [each.model_fields[part] for each in models if isinstance(part, str) and part in each.model_fields]
        models = {below for field in fields for below in _models_in(field.annotation)} or models
    return {key for each in models for key in each.model_fields} - {"id", "presence"}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _explain(fault: dict[str, Any], path: _Path, model: type[BaseModel]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        close = get_close_matches(str(path[-1]), _keys_at(path, model), 1)
        hint = f"did you mean {close[0]!r}?" if close else "check its spelling against docs/mixture-file.md"
        return f"unknown key; {hint} (found {fault['input']!r})"
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "value_error":
        return message
    if fault["type"] == "string_pattern_mismatch":
        message = f"expected {PATTERNS_IN_WORDS[fault['ctx']['pattern']]}"
    return f"{message}; found {fault['input']!r}"

"""The faults of a mixture file, a line for each: where it stands, the path of the field, what was found, what was
expected."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import yaml
from pydantic import ValidationError

from tokenloom_server.config.base import NAMES_IN_WORDS, Section

#: Characters of a fault, which quotes what somebody wrote.
MAX_LINE = 2000
#: And of the value of an unknown key, which may be all of a mixture.
MAX_FOUND = 80

_Path = tuple[str | int, ...]


def explain(error: ValidationError, where: str, field: str = "", text: str = "") -> str:
    """A line for each fault; ``where`` begins it. ``field``: in which the document stands. ``text``: its YAML, for
    lines and columns."""
    begin = f"{where}: " if where else ""
    root = yaml.compose(text, Loader=yaml.CSafeLoader) if text else None
    lines = []
    for fault in error.errors():
        path = _path(fault["loc"])
        named = ".".join(map(str, (field, *path) if field else path))
        line = f"{begin}{_position(root, path)}{named and named + ': '}{_explain(dict(fault))}"
        lines.append(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…")
    return "\n".join(lines)


def _is_tag(part: str | int, before: str | int) -> bool:
    if isinstance(before, int):
        return part in ("source", "node")
    return before == "weight" and part in ("number", "points")


def _path(location: _Path) -> _Path:
    # The tags of the union are pydantic's own; the user's file has no such level.
    return tuple(
        part for i, part in enumerate(location) if not (i and _is_tag(part, location[i - 1]))
    )


def _position(node: Any, path: Sequence[str | int]) -> str:
    """Where a field's key stands in the YAML, of a field that is missing the last above it that does not; empty where
    that is not known."""
    mark = None
    for part in path:
        if isinstance(node, yaml.MappingNode):
            key, node = next(
                ((key, value) for key, value in node.value if key.value == part), (None, None)
            )
            mark = key.start_mark if key is not None else mark
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            mark = node.start_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""


def _explain(fault: dict[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        known = {key for section in Section.__subclasses__() for key in section.model_fields} - {
            "id",
            "presence",
        }
        close = get_close_matches(str(fault["loc"][-1]), sorted(known), 1)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else "check its spelling against docs/mixture-file.md"
        )
        value = repr(fault["input"])
        return f"unknown key; {hint} (found {value if len(value) <= MAX_FOUND else f'{value[:MAX_FOUND]}…'})"
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "value_error":
        return message
    if fault["type"] == "string_pattern_mismatch":
        message = f"expected {NAMES_IN_WORDS.get(fault['ctx']['pattern'], 'text of ' + fault['ctx']['pattern'])}"
    return f"{message}; found {fault['input']!r}"

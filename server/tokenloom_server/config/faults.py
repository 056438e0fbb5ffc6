"""The faults of a mixture file, a line for each: the path of the field, what was found, what was expected."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

#: Characters of a fault, which quotes what somebody wrote.
MAX_LINE = 2000


def explain(error: ValidationError, where: str, field: str = "") -> str:
    """A line for each fault; ``where`` begins it. ``field``: in which the document stands."""
    begin = f"{where}: " if where else ""
    within = (field,) if field else ()
    faults = (f"{begin}{_field((*within, *fault['loc']))}{_explain(dict(fault))}" for fault in error.errors())
    return "\n".join(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in faults)


def _is_tag(part: str | int, before: str | int) -> bool:
    if isinstance(before, int):
        return part in ("source", "node")
    return before == "weight" and part in ("number", "points")


def _field(location: tuple[str | int, ...]) -> str:
    # The tags of the union are pydantic's own; the user's file has no such level.
    parts = [str(p) for i, p in enumerate(location) if not (i and _is_tag(p, location[i - 1]))]
    return ".".join(parts) + ": " if parts else ""


def _explain(fault: dict[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"unknown key; check its spelling against docs/mixture-file.md (found {fault['input']!r})"
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "value_error":
        return message
    return f"{message}; found {fault['input']!r}"

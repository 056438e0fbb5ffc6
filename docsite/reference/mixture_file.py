"""The fields of the mixture file, by its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tokenloom_tools.cli.init import schema_text

from docsite.reference.markdown import entries, link, prose

HERE = "mixture-file.md"
#: Where a field's page says more of it than its description.
GUIDES = {
    "batching": "buckets.md",
    "chat_tools": "chats.md",
    "commit": "sources/hf.md#one-commit-for-the-whole-run",
    "count": "mixtures.md#what-is-counted-where-samples-are-padded",
    "filter": "rows.md",
    "fim": "rows.md",
    "holdout": "evaluation.md",
    "new_source_baseline": "other-checkpoints.md",
    "packing": "packing.md",
    "phases": "mixtures.md#phases",
    "policy": "mixtures.md",
    "seen": "from-mosaic.md",
    "shuffle": "shuffling.md",
    "source": "#sources",
    "streams": "evaluation.md",
    "template": "rows.md",
    "tokenizer": "#the-tokeniser",
    "transform": "rows.md#transform-a-function-of-your-own-experimental",
}
#: By the name of a table: the definition of the schema whose fields it has; the run's is the schema itself.
_DEFINITIONS = {
    "run": None,
    "node": "NodeConfig",
    "source": "SourceConfig",
    "phases": "PhaseConfig",
    "streams": "StreamConfig",
    "batching": "BatchingConfig",
    "fim": "FimConfig",
    "ids of fim": "FimIds",
    "seen": "SeenConfig",
}


def tables() -> dict[str, Callable[[], str]]:
    return {
        f"fields of {name}": partial(_fields, definition)
        for name, definition in _DEFINITIONS.items()
    }


def _fields(definition: str | None) -> str:
    schema = json.loads(schema_text())
    section = schema["$defs"][definition] if definition else schema
    required = section.get("required", ())

    def rows() -> Iterator[tuple[str, str, str]]:
        for name, field in section["properties"].items():
            more = f" ({link(GUIDES[name], HERE)})" if name in GUIDES else ""
            values = " or ".join(dict.fromkeys(_values(field)))
            default = "required" if name in required else _default(field)
            text = prose(field.get("description", "")) + more
            yield f"`{name}`", "; ".join(filter(None, (values, default))), text

    return entries(rows())


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return (
        ""
        if value is None
        else f"default `{json.dumps(value)}`"
        if not isinstance(value, str)
        else f"default `{value}`"
    )


def _values(field: dict[str, Any]) -> Iterator[str]:
    """What a field may be, in words."""
    options = field.get("anyOf") or field.get("oneOf")
    if "enum" in field:
        yield ", ".join(
            f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in field["enum"]
        )
    elif "const" in field:
        yield f"`{field['const']}`"
    elif options:
        for option in options:
            yield from _values(option)
    elif "$ref" in field:
        yield (
            "node"
            if field["$ref"].endswith("NodeConfig")
            else "source"
            if "SourceConfig" in field["$ref"]
            else "section"
        )
    elif field.get("type") == "array":
        items = " or ".join(dict.fromkeys(_values(field["items"]))) if "items" in field else ""
        yield "list of points" if "prefixItems" in field.get("items", field) else f"list: {items}"
    elif field.get("type") in ("integer", "number"):
        yield _number(field)
    elif field.get("type") == "string" and not field.get("pattern", "").startswith(
        "^[0-9]+"
    ):  # a number such as 1e9
        yield "text"
    elif field.get("type") in ("object", "boolean"):
        yield {"object": "mapping", "boolean": "`true` or `false`"}[field["type"]]


def _number(field: dict[str, Any]) -> str:
    kind = "integer" if field["type"] == "integer" else "number"
    bounds = (
        (" ≥ ", "minimum"),
        (" > ", "exclusiveMinimum"),
        (" ≤ ", "maximum"),
        (" < ", "exclusiveMaximum"),
    )
    said = (f"{sign}{field[name]:,}" for sign, name in bounds if field.get(name, 2**53) < 2**53 - 1)
    return kind + ",".join(said)

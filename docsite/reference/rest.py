"""Bodies and answers of the REST routes, by the OpenAPI document that a server answers with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docsite.reference.markdown import prose, table
from docsite.repository import ROOT

#: What ``GET /openapi.json`` gives, which a test holds to be so.
DOCUMENT = ROOT / "tests" / "golden" / "openapi.json"


def routes() -> str:
    """A section for each route with its parameters, its body and its answers; after them one for each object."""
    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    sections = [
        "\n".join(_route(f"{method.upper()} {path}", operation))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    objects = (
        "\n".join(_object(name, schema))
        for name, schema in document["components"]["schemas"].items()
    )
    return "\n".join((*sections, "## Objects\n", *objects))


def _route(title: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {title}\n\n{prose(operation['summary'])}\n\n{prose(operation.get('description', ''))}\n"
    if parameters := operation.get("parameters"):
        rows = (
            (f"`{p['name']}`", p["in"], _type(p["schema"]), prose(p.get("description", "")))
            for p in parameters
        )
        yield table(("parameter", "in", "value", "meaning"), rows)
    if body := operation.get("requestBody"):
        yield f"Body: {_content(body)}\n"
        for example in (
            e for content in body["content"].values() for e in content.get("examples", {}).values()
        ):
            value = json.dumps(example["value"], ensure_ascii=False, indent=2)
            yield f"{example['summary']}:\n\n```json\n{value}\n```\n"
    answers = (
        (status, _content(answer), prose(answer["description"]))
        for status, answer in operation["responses"].items()
    )
    yield table(("status", "body", "meaning"), answers)


def _content(body: dict[str, Any]) -> str:
    kinds = (
        _type(c["schema"]) if c.get("schema") else f"`{name}`"
        for name, c in body.get("content", {}).items()
    )
    return " or ".join(dict.fromkeys(kinds))


def _object(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n\n{prose(schema.get('description', ''))}\n"
    required = schema.get("required", ())
    if fields := schema.get("properties"):
        rows = (
            (
                f"`{key}`",
                _type(field),
                "required" if key in required else "",
                prose(field.get("description", "")),
            )
            for key, field in fields.items()
        )
        yield table(("field", "value", "", "meaning"), rows)


def _type(schema: dict[str, Any]) -> str:
    """A value's type in words; an object of the document as a link to it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, options)))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    return str(schema.get("type", "any"))

"""What Tokenloom can do, a sorted line for each capability; ``make capabilities`` writes them down.

``CAPABILITIES.txt`` at the repository root is this list. A change that removes a line takes something from users.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenloom
from google.protobuf.descriptor import Descriptor
from tokenloom_proto import dataloader_pb2
from tokenloom_server import errors
from tokenloom_server.api.metrics import create_registry
from tokenloom_server.api.rest.app import create_app
from tokenloom_server.api.rest.problems import HTTP_ERRORS
from tokenloom_server.api.rest.routes import Backend
from tokenloom_server.config.run import RunConfig
from tokenloom_server.sources.catalog import BUILT_IN
from tokenloom_tools.cli.app import app
from tokenloom_tools.cli.serve import tool_routes
from typer.main import get_command

from tests.support.catalog import CATALOG
from tests.support.memory_service import ACCESS, MemoryService

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "CAPABILITIES.txt"
ENVIRONMENT = re.compile(
    r'environ\w*(?:\.get\(|\[)"([A-Z_]+)"|"([A-Z_]+)" (?:not )?in (?:os\.)?environ'
    r'|"((?:TOKENLOOM|SLURM)_[A-Z]+(?:_[A-Z]+)*)"'
)


def capabilities() -> str:
    kinds = (
        _commands,
        _routes,
        _mixture_fields,
        _metrics,
        _errors,
        _client,
        _integrations,
        _wire,
        _variables,
    )
    return "".join(f"{line}\n" for line in sorted({line for kind in kinds for line in kind()}))


def commands(path: str = "tokenloom", command: Any = None) -> Iterator[tuple[str, Any]]:
    """Every command and group of commands, as it is typed."""
    command = command or get_command(app)
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(f"{path} {name}", below)


def _commands() -> Iterator[str]:
    for path, command in commands():
        yield f"cli: {path}"
        for parameter in command.params:
            if getattr(parameter, "hidden", False):
                if path == "tokenloom serve":
                    yield f"setting of a server: {parameter.opts[0].removeprefix('--')}"
                continue
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            yield f"cli: {path} {names}" + (
                f" (environment {parameter.envvar})" if parameter.envvar else ""
            )


def _routes() -> Iterator[str]:
    document = create_app(Backend(MemoryService(), "0"), tool_routes()).openapi()
    definitions = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = f"rest: {method.upper()} {path}"
            yield route
            yield from (f"{route} {p['in']} {p['name']}" for p in operation.get("parameters", ()))
            asked = {"body": operation["requestBody"]} if "requestBody" in operation else {}
            for kind, body in (asked | operation["responses"]).items():
                yield f"{route} {kind}"
                for content in (
                    body.get("content", {}).values() if kind in ("body", "200", "201") else ()
                ):
                    yield from (
                        f"{route} {kind} {field}"
                        for field in _fields(content["schema"], definitions, ())
                    )


def _mixture_fields() -> Iterator[str]:
    schema = RunConfig.model_json_schema()
    yield from (f"mixture file: {field}" for field in _fields(schema, schema["$defs"], (), once={}))
    yield f"mixture file: mixture.policy = {' | '.join(CATALOG.policies)}"
    yield from (f"mixture file: source {scheme.usage}" for scheme in BUILT_IN)


def _fields(
    schema: dict[str, Any],
    definitions: dict[str, Any],
    within: tuple[str, ...],
    path: str = "",
    once: dict[str, str] | None = None,
) -> Iterator[str]:
    """The dotted path of each field of a JSON schema, with the values of those that are one of a list.

    A definition is not entered within itself, and only at the first path that refers to it where ``once`` keeps these.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if once is not None and once.setdefault(name, path) != path:
            yield f"{path} (as {once[name]})"
        if name in within or (once is not None and once[name] != path):
            return
        yield from _fields(definitions[name], definitions, (*within, name), path, once)
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _fields(option, definitions, within, path, once)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        yield f"{path} = {' | '.join(map(str, values))}"
    for name, below in schema.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        yield inner
        yield from _fields(below, definitions, within, inner, once)
    if isinstance(schema.get("items"), dict):
        yield from _fields(schema["items"], definitions, within, f"{path}[]", once)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _fields(schema["additionalProperties"], definitions, within, f"{path}.*", once)


def _metrics() -> Iterator[str]:
    for family in create_registry(MemoryService(), version="0", access=ACCESS).collect():
        labels = {name for sample in family.samples for name in sample.labels} | set(
            getattr(family, "_labelnames", ())
        )
        yield f"metric: {family.type} {family.name}{{{','.join(sorted(labels))}}}"


def _errors() -> Iterator[str]:
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.TokenloomError):
            yield f"error: {name} gRPC {kind.grpc_status} HTTP {kind.http_status}"
    yield from (f"error: {name} HTTP {status}" for status, name in HTTP_ERRORS.items())


def _client() -> Iterator[str]:
    for name in tokenloom.__all__:
        value = getattr(tokenloom, name)
        yield f"client: {name}"
        if not inspect.isclass(value):
            yield from (
                f"client: {name}({parameter})" for parameter in inspect.signature(value).parameters
            )
            continue
        seen: set[str] = set()
        for kind in (kind for kind in value.__mro__ if kind.__module__.startswith("tokenloom.")):
            members = dict.fromkeys(vars(kind).get("__annotations__", ())) | dict(vars(kind))
            members = {member: found for member, found in members.items() if member not in seen}
            seen |= members.keys()
            for member, found in members.items():
                if not member.startswith("_") or (
                    member == "__init__" and inspect.isfunction(found)
                ):
                    function = getattr(found, "__func__", found)
                    shown = f"{name}.{member}".removesuffix(".__init__")
                    yield f"client: {shown}"
                    if inspect.isfunction(function):
                        names = [
                            n
                            for n in inspect.signature(function).parameters
                            if n not in ("self", "cls")
                        ]
                        yield from (f"client: {shown}({parameter})" for parameter in names)


def _integrations() -> Iterator[str]:
    """Read and not imported: most frameworks are slow to import."""
    for path in sorted((ROOT / "client/tokenloom/integrations").glob("*.py")):
        waiting = [(path.stem, node) for node in ast.parse(path.read_text(encoding="utf-8")).body]
        while waiting:
            within, node = waiting.pop()
            name = getattr(node, "name", "_")
            if isinstance(node, ast.ClassDef) and not name.startswith("_"):
                yield f"integration: {within}.{name}"
                waiting += [(f"{within}.{name}", member) for member in node.body]
            elif isinstance(node, ast.FunctionDef) and (
                not name.startswith("_") or name == "__init__"
            ):
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                yield f"integration: {within}.{name}({', '.join(argument.arg for argument in arguments)})"


def _wire() -> Iterator[str]:
    def walk(message: Descriptor) -> Iterator[str]:
        for field in message.fields:
            yield f"wire: {message.full_name}.{field.name} = {field.number}"
        for enum in message.enum_types:
            yield from (
                f"wire: {enum.full_name}.{value.name} = {value.number}" for value in enum.values
            )
        for below in message.nested_types:
            yield from walk(below)

    file = dataloader_pb2.DESCRIPTOR
    for service in file.services_by_name.values():
        yield from (f"wire: rpc {method.full_name}" for method in service.methods)
    for message in file.message_types_by_name.values():
        yield from walk(message)


def _variables() -> Iterator[str]:
    for folder in ("client", "server", "proto"):
        for path in (ROOT / folder).rglob("*.py"):
            for groups in ENVIRONMENT.findall(path.read_text(encoding="utf-8")):
                yield from (f"environment: {name}" for name in groups if name)


if __name__ == "__main__":
    FILE.write_text(capabilities(), encoding="utf-8")

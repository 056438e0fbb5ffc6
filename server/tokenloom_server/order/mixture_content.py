"""A mixture as plain data, and back: with its ids for revisions, without them for files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.faults import explain
from tokenloom_server.config.node import Child, NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.errors import ConfigError

#: What decides no order, and is the mixture file's to say.
_BAD_ROWS = ("on_bad_row", "max_bad_rows", "on_blank_line")


def content_of(config: RunConfig) -> dict[str, Any]:
    """The mixture as plain data, ids included; ``with_content`` reads it."""
    dumped: dict[str, Any] = _plain(config.mixture.model_dump(exclude_defaults=True))
    return {"mixture": dumped, "sequence_length": config.sequence_length}


def with_content(config: RunConfig, content: Mapping[str, Any]) -> RunConfig:
    """The config with the mixture of a ``content_of``. How bad rows of its sources are treated stays as it is: a run
    that a bad row has stopped gets to no revision."""
    bad_rows = {
        source.source: {field: getattr(source, field) for field in _BAD_ROWS}
        for source in config.sources
    }
    root = with_sources(
        content["mixture"], lambda source: source | bad_rows.get(source["source"], {})
    )
    return validated(config, root, content["sequence_length"])


def with_sources(
    node: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A node as plain data, with what ``change`` makes of each source below it."""
    children = (
        with_sources(child, change) if "children" in child else change(child)
        for child in node["children"]
    )
    return node | {"children": list(children)}


def as_file(config: RunConfig) -> dict[str, Any]:
    """The mixture in force as a mixture file would have it: without ids and what was dropped."""

    def visit(node: NodeConfig) -> dict[str, Any]:
        fields = node.model_dump(exclude_defaults=True, exclude={"id", "presence", "children"})
        fields["policy"] = node.policy
        fields["children"] = [
            visit(child)
            if isinstance(child, NodeConfig)
            else child.model_dump(exclude_defaults=True, exclude={"id", "presence"})
            for child in node.children
            if child.presence != "dropped"
        ]
        return fields

    file: dict[str, Any] = _plain(visit(config.mixture))
    return file


def places(config: RunConfig) -> Iterator[tuple[str, Child]]:
    """Every child that was not dropped, and its place, such as ``mixture.children.2``, as ``as_file`` shows it."""

    def below(node: NodeConfig, path: str) -> Iterator[tuple[str, Child]]:
        for i, child in enumerate(child for child in node.children if child.presence != "dropped"):
            yield f"{path}.children.{i}", child
            if isinstance(child, NodeConfig):
                yield from below(child, f"{path}.children.{i}")

    yield "mixture", config.mixture
    yield from below(config.mixture, "mixture")


_Model = TypeVar("_Model", bound=BaseModel)


def validated(
    config: RunConfig, root: dict[str, Any], sequence_length: int | None = None
) -> RunConfig:
    """The config with another mixture, and sequence length where one is given. Raises ``ConfigError``."""
    document = config.model_dump(exclude={"mixture"}) | {"mixture": root}
    if sequence_length is not None:
        document["sequence_length"] = sequence_length
    return parsed(RunConfig, document, "", config.catalog)


def parsed(model: type[_Model], document: dict[str, Any], where: str, catalog: Catalog) -> _Model:
    """A part of a mixture file. Raises ``ConfigError`` that says where it stands."""
    try:
        return model.model_validate(document, context=catalog)
    except ValidationError as error:
        raise ConfigError(explain(error, "", where)) from None


def children_of(config: RunConfig) -> Iterator[Child]:
    yield config.mixture
    for node in config.nodes:
        yield from node.children


def child_key(child: Child) -> tuple[type, int]:
    return type(child), child.id


def _plain(value: Any) -> Any:
    """As JSON has it: no infinity."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return "inf" if value == float("inf") else value


def field_text(value: object) -> str:
    """A field's value as messages show it."""
    return (
        f"{value:g}" if isinstance(value, float) else "not given" if value is None else str(value)
    )

"""The config that a change of the mixture gives.

A tree only grows: a source that leaves stays in it as dropped, with its cursor and counters, so that ids are never
given twice and every counter still adds up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenloom_server.config.mixture_file import given_by_the_server
from tokenloom_server.config.node import Child, NodeConfig
from tokenloom_server.config.order_fields import DRAWN, UNREVISABLE
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.order.mixture_content import (
    as_file,
    child_key,
    children_of,
    field_text,
    parsed,
    validated,
    with_sources,
)

if TYPE_CHECKING:
    from tokenloom_server.config.mixture_change import Addition, MixtureChange, Setting

#: What of a child may be set. Everything else (its spec, how its documents begin and end) makes it another source.
SETTABLE = (
    "weight",
    "policy",
    "on_exhausted",
    "epochs",
    "max_tokens",
    "unit",
    "interpolate",
    "alias",
)


def changed(config: RunConfig, change: MixtureChange) -> RunConfig:
    """The config with the change's mixture. Raises ``ConfigError`` naming the field, what was found and expected."""
    documents = [(f"add.{i}.child", addition.child) for i, addition in enumerate(change.add)]
    for where, document in [*documents, ("mixture", change.mixture)]:
        for key in given_by_the_server(document, f"{where}."):
            raise ConfigError(f"{key}: unknown key; ids and presence are this server's")
    if change.mixture is not None:
        if change.set or change.add or change.drop:
            raise ConfigError(
                "mixture: a whole mixture is given, so set, add and drop must be left out"
            )
        return merged(config, parsed(NodeConfig, change.mixture, "mixture", config.catalog))
    tree = _MixtureTree(config)
    for i, setting in enumerate(change.set):
        tree.set(setting, f"set.{i}")
    for i, name in enumerate(change.drop):
        tree.drop(name, f"drop.{i}")
    for i, addition in enumerate(change.add):
        tree.add(addition, f"add.{i}")
    return validated(config, tree.root)


def merged(config: RunConfig, mixture: NodeConfig, sequence_length: int | None = None) -> RunConfig:
    """The config with another mixture, as a file has it: sources are known by their specs, nodes by their aliases, or
    by their place among a node's children without one. What is new gets ids; sources that are gone stay as dropped."""
    source_ids, node_ids = _new_ids(config)
    known_sources = {source.source: source for source in config.sources}
    named_nodes = {node.alias: node for node in config.nodes if node.alias is not None}
    parents = {
        child.id: node.id
        for node in config.nodes
        for child in node.children
        if isinstance(child, SourceConfig)
    }
    seen: set[str] = set()
    kept_nodes: dict[int, dict[str, Any]] = {}

    def visit(node: NodeConfig, known_node: NodeConfig | None) -> dict[str, Any]:
        fields = node.model_dump(exclude={"children"})
        if known_node is None:
            fields["id"] = next(node_ids)
        else:
            fields |= {"id": known_node.id, "presence": _kept_presence(known_node)}
        kept_nodes[fields["id"]] = fields
        children = known_node.children if known_node is not None else ()
        unnamed = [
            child for child in children if isinstance(child, NodeConfig) and child.alias is None
        ]
        fields["children"] = []
        for child in node.children:
            if isinstance(child, NodeConfig):
                old = (
                    named_nodes.get(child.alias)
                    if child.alias is not None
                    else (unnamed.pop(0) if unnamed else None)
                )
                fields["children"].append(
                    visit(child, None if old is None or old.id in kept_nodes else old)
                )
                continue
            known = known_sources.get(child.source)
            seen.add(child.source)
            if known is None:
                update: dict[str, Any] = {"id": next(source_ids)}
            else:
                _refuse_another(known, child)
                update = {"id": known.id, "presence": _kept_presence(known)}
            fields["children"].append(child.model_dump() | update)
        return fields

    root = visit(mixture, config.mixture)
    for source in config.sources:
        if source.source not in seen:
            parent = kept_nodes.get(parents[source.id], root)
            # Which weights it may have is its new siblings' policy's to say, and it needs none.
            parent["children"].append(source.model_dump() | {"presence": "dropped", "weight": 1.0})
    return validated(config, root, sequence_length)


def _new_ids(config: RunConfig) -> tuple[Iterator[int], Iterator[int]]:
    """Ids for new sources, and for new nodes."""
    return count(len(config.sources)), count(config.nodes[-1].id + 1)


def _kept_presence(known: Child) -> str:
    """The presence of a child that a new mixture has again: a dropped one goes on, a paused one stays paused."""
    return "paused" if known.presence == "paused" else "live"


def without(config: RunConfig, gone: Collection[int]) -> RunConfig:
    """The config in which these sources are dropped."""
    if not any(config.sources[source].presence != "dropped" for source in gone):
        return config

    def dropped(source: dict[str, Any]) -> dict[str, Any]:
        return source | {"presence": "dropped"} if source["id"] in gone else source

    return validated(config, with_sources(config.mixture.model_dump(), dropped))


def differences(old: RunConfig, new: RunConfig, fields: Sequence[str] = SETTABLE) -> list[str]:
    """What another config changes, a line each, for people; of children only these fields."""
    lines = []
    if old.sequence_length != new.sequence_length:
        lines.append(f"sequence_length: {old.sequence_length} → {new.sequence_length}")
    before = {child_key(child): child for child in children_of(old)}
    for child in children_of(new):
        known, name = before.get(child_key(child)), child.name
        if known is None:
            lines.append(f"{name}: new, weight {field_text(child.weight)}")
            continue
        if known.presence != child.presence:
            lines.append(f"{name}: {known.presence} → {child.presence}")
        lines += [
            f"{name}: {field} {field_text(getattr(known, field))} → {field_text(getattr(child, field))}"
            for field in fields
            if field in type(child).model_fields and getattr(known, field) != getattr(child, field)
        ]
    now = {child_key(child) for child in children_of(new)}
    lines += [f"{child.name}: gone" for key, child in before.items() if key not in now]
    return lines


def differences_of_files(in_force: RunConfig, file: RunConfig) -> list[str]:
    """What a mixture file changes of the mixture in force, a line each; whatever is paused stays so."""
    new = merged(in_force, parsed(NodeConfig, as_file(file), "mixture", file.catalog))
    return differences(in_force, new, fields=[field for field in SETTABLE if field != "alias"])


class _TreePlace(NamedTuple):
    """A child in the tree of plain data, its parent there, and its place, such as ``mixture.children.2``."""

    child: dict[str, Any]
    parent: dict[str, Any] | None
    path: str


class _MixtureTree:
    """The mixture as plain data that is being changed."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.root = config.mixture.model_dump()
        self._source_ids, self._node_ids = _new_ids(config)

    def set(self, setting: Setting, where: str) -> None:
        child = self._find(setting.child, f"{where}.child").child
        settings = setting.model_dump(exclude_unset=True, exclude={"child", "paused"})
        for field, value in settings.items():
            if field not in child:
                kind = "node" if "children" in child else "source"
                raise ConfigError(
                    f"{where}.{field}: a {kind} has no {field}; found {value!r} for {setting.child!r}"
                )
            child[field] = value
        if setting.paused is not None:
            child["presence"] = "paused" if setting.paused else "live"
        if not settings and setting.paused is None:
            raise ConfigError(
                f"{where}: sets nothing of {setting.child!r}; expected one of {', '.join(SETTABLE)}, paused"
            )

    def drop(self, name: str, where: str) -> None:
        place = self._find(name, where)
        if place.parent is None:
            raise ConfigError(
                f"{where}: {name!r} is the whole mixture; drop sources or nodes of it"
            )
        self._drop_all(place.child)

    def _drop_all(self, child: dict[str, Any]) -> None:
        """Drops a child and all below it."""
        child["presence"] = "dropped"
        for below in child.get("children", ()):
            self._drop_all(below)

    def add(self, addition: Addition, where: str) -> None:
        parent = self._find(addition.to, f"{where}.to").child
        if "children" not in parent:
            raise ConfigError(
                f"{where}.to: {addition.to!r} is a source; expected a node's alias or place"
            )
        is_node = "children" in addition.child or "policy" in addition.child
        kind: type[NodeConfig | SourceConfig] = NodeConfig if is_node else SourceConfig
        added = parsed(kind, addition.child, f"{where}.child", self._config.catalog)
        parent["children"].append(self._numbered(added, where))
        self._prune(self.root)

    def _taken_back(self, known: SourceConfig, source: SourceConfig, where: str) -> dict[str, Any]:
        """A source that was dropped goes on where it stood."""
        place = self._find(known.source, where, dropped=True)
        if place.child["presence"] != "dropped":
            raise ConfigError(
                f"{where}.child.source: {known.source!r} is in the mixture already; use set to change it, and "
                "paused: false where it is paused"
            )
        _refuse_another(known, source)
        assert place.parent is not None
        place.parent["children"].remove(place.child)
        return source.model_dump() | {"id": known.id}

    def _numbered(self, child: Child, where: str) -> dict[str, Any]:
        if isinstance(child, SourceConfig):
            known = next(
                (source for source in self._config.sources if source.source == child.source), None
            )
            if known is not None:
                return self._taken_back(known, child, where)
            return child.model_dump() | {"id": next(self._source_ids)}
        fields = child.model_dump() | {"id": next(self._node_ids)}
        fields["children"] = [self._numbered(each, where) for each in child.children]
        return fields

    def _prune(self, node: dict[str, Any]) -> None:
        """Removes nodes of which every child went elsewhere."""
        for child in node["children"]:
            if "children" in child:
                self._prune(child)
        node["children"] = [child for child in node["children"] if child.get("children") != []]

    def _find(self, name: str, where: str, *, dropped: bool = False) -> _TreePlace:
        places = list(self._places(self.root, None, "mixture"))
        matches = [
            place
            for place in places
            if name in (place.child["alias"], place.child.get("source"), place.path)
            and (dropped or place.child["presence"] != "dropped")
        ]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ConfigError(
                f"{where}: {name!r} names {len(matches)} children; use the place, such as mixture.children.0"
            )
        known = ", ".join(
            repr(place.child["alias"] or place.child.get("source") or place.path)
            for place in places
            if place.child["presence"] != "dropped"
        )
        raise ConfigError(f"{where}: the mixture has no {name!r}; it has {known}")

    def _places(
        self, child: dict[str, Any], parent: dict[str, Any] | None, path: str
    ) -> Iterator[_TreePlace]:
        """Places are counted as ``as_file`` shows them; what was dropped has none."""
        yield _TreePlace(child, parent, path)
        number = count()
        for below in child.get("children", ()):
            is_shown = below["presence"] != "dropped" and path
            yield from self._places(
                below, child, f"{path}.children.{next(number)}" if is_shown else ""
            )


def _refuse_another(known: SourceConfig, source: SourceConfig) -> None:
    """Whether a source of the run's is read as it was. Raises ``ConfigError``."""
    for field in UNREVISABLE:
        if getattr(known, field) != getattr(source, field):
            makes = (
                "another order of its rows"
                if field in DRAWN
                else "other documents of the same rows"
            )
            raise ConfigError(
                f"{source.source!r}: {field} is {field_text(getattr(known, field))} in this run and "
                f"{field_text(getattr(source, field))} in the new mixture, or in a phase; that would make {makes}: "
                "give both the same, or begin a new run"
            )

"""The config that a change of the mixture gives.

A tree only grows: a source that leaves stays in it as dropped, with its cursor and counters, so that ids are never
given twice and every counter still adds up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.config.mixture_file import given_by_the_server
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.order.mixture_content import as_file, child_key, children_of, field_text, node_from, validated
from tokenloom_server.order.mixture_tree import SETTABLE, MixtureTree, refuse_another


def changed(config: RunConfig, change: MixtureChange) -> RunConfig:
    """The config with the change's mixture. Raises ``ConfigError`` naming the field, what was found and expected."""
    documents = [(f"add.{i}.child", addition.child) for i, addition in enumerate(change.add)]
    for where, document in [*documents, ("mixture", change.mixture)]:
        for at in given_by_the_server(document, f"{where}."):
            raise ConfigError(f"{at}: unknown key; ids and presence are this server's")
    if change.mixture is not None:
        if change.set or change.add or change.drop:
            raise ConfigError("mixture: a whole mixture is given, so set, add and drop must be left out")
        return merged(config, node_from(change.mixture, "mixture", config.catalog))
    tree = MixtureTree(config)
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
    next_source, next_node = len(config.sources), config.nodes[-1].id + 1
    known_sources = {source.source: source for source in config.sources}
    named_nodes = {node.alias: node for node in config.nodes if node.alias is not None}
    parents = {child.id: node.id for node in config.nodes for child in node.children if isinstance(child, SourceConfig)}
    seen: set[str] = set()
    kept_nodes: dict[int, dict[str, Any]] = {}

    def visit(node: NodeConfig, was: NodeConfig | None) -> dict[str, Any]:
        nonlocal next_source, next_node
        fields = node.model_dump(exclude={"children"})
        if was is None:
            fields["id"], next_node = next_node, next_node + 1
        else:
            fields |= {"id": was.id, "presence": was.presence if was.presence == "paused" else "live"}
        kept_nodes[fields["id"]] = fields
        unnamed = (
            [child for child in was.children if isinstance(child, NodeConfig) and child.alias is None] if was else []
        )
        fields["children"] = []
        for child in node.children:
            if isinstance(child, NodeConfig):
                old = named_nodes.get(child.alias) if child.alias is not None else (unnamed.pop(0) if unnamed else None)
                fields["children"].append(visit(child, None if old is None or old.id in kept_nodes else old))
                continue
            known = known_sources.get(child.source)
            seen.add(child.source)
            if known is None:
                update: dict[str, Any] = {"id": next_source}
                next_source += 1
            else:
                refuse_another(known, child)
                update = {"id": known.id, "presence": "paused" if known.presence == "paused" else "live"}
            fields["children"].append(child.model_dump() | update)
        return fields

    root = visit(mixture, config.mixture)
    for source in config.sources:
        if source.source not in seen:
            parent = kept_nodes.get(parents[source.id], root)
            # Which weights it may have is its new siblings' policy's to say, and it needs none.
            parent["children"].append(source.model_dump() | {"presence": "dropped", "weight": 1.0})
    return validated(config, root, sequence_length)


def without(config: RunConfig, gone: Collection[int]) -> RunConfig:
    """The config in which these sources are dropped."""
    if not any(config.sources[source].presence != "dropped" for source in gone):
        return config

    def visit(node: dict[str, Any]) -> dict[str, Any]:
        children = []
        for child in node["children"]:
            if "children" in child:
                children.append(visit(child))
            else:
                children.append(child | ({"presence": "dropped"} if child["id"] in gone else {}))
        return node | {"children": children}

    return validated(config, visit(config.mixture.model_dump()))


def differences(old: RunConfig, new: RunConfig, fields: Sequence[str] = SETTABLE) -> list[str]:
    """What another config changes, a line each, for people; of children only these fields."""
    found = []
    if old.sequence_length != new.sequence_length:
        found.append(f"sequence_length: {old.sequence_length} → {new.sequence_length}")
    before = {child_key(child): child for child in children_of(old)}
    for child in children_of(new):
        was, name = before.get(child_key(child)), child.name
        if was is None:
            found.append(f"{name}: new, weight {field_text(child.weight)}")
            continue
        if was.presence != child.presence:
            found.append(f"{name}: {was.presence} → {child.presence}")
        found += [
            f"{name}: {field} {field_text(getattr(was, field))} → {field_text(getattr(child, field))}"
            for field in fields
            if field in type(child).model_fields and getattr(was, field) != getattr(child, field)
        ]
    now = {child_key(child) for child in children_of(new)}
    found += [f"{child.name}: gone" for key, child in before.items() if key not in now]
    return found


def differences_of_files(in_force: RunConfig, file: RunConfig) -> list[str]:
    """What a mixture file changes of the mixture in force, a line each; whatever is paused stays so."""
    new = merged(in_force, node_from(as_file(file), "mixture", file.catalog))
    return differences(in_force, new, fields=[field for field in SETTABLE if field != "alias"])

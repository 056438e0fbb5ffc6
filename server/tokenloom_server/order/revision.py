"""A change of the mixture during a run: the config that it gives, and the state carried over.

A tree only grows: a source that leaves stays in it as dropped, with its cursor and counters, so that ids are never
given twice and every counter still adds up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.faults import explain
from tokenloom_server.config.mixture_change import Addition, MixtureChange, Setting
from tokenloom_server.config.mixture_file import given_by_the_server
from tokenloom_server.config.node import Child, NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import ChildState, SourceState, State, packed_again
from tokenloom_server.errors import ConfigError
from tokenloom_server.mixing.mixer import Mixer
from tokenloom_server.mixing.policy import NodeChange, policy_of

#: What of a child may be set. Everything else (its spec, how its documents begin and end) makes it another source.
_SETTABLE = ("weight", "policy", "on_exhausted", "epochs", "max_tokens", "unit", "interpolate", "alias")


#: What decides no order, and is the mixture file's to say.
_BAD_ROWS = ("on_bad_row", "max_bad_rows")


def changed(config: RunConfig, change: MixtureChange) -> RunConfig:
    """The config with the change's mixture. Raises ``ConfigError`` naming the field, what was found and expected."""
    documents = [(f"add.{i}.child", addition.child) for i, addition in enumerate(change.add)]
    for where, document in [*documents, ("mixture", change.mixture)]:
        for at in given_by_the_server(document, f"{where}."):
            raise ConfigError(f"{at}: unknown key; ids and presence are this server's")
    if change.mixture is not None:
        if change.set or change.add or change.drop:
            raise ConfigError("mixture: a whole mixture is given, so set, add and drop must be left out")
        return merged(config, _node(change.mixture, "mixture", config.catalog))
    tree = _Tree(config)
    for i, setting in enumerate(change.set):
        tree.set(setting, f"set.{i}")
    for i, name in enumerate(change.drop):
        tree.drop(name, f"drop.{i}")
    for i, addition in enumerate(change.add):
        tree.add(addition, f"add.{i}")
    return _validated(config, tree.root)


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
                _refuse_another(known, child)
                update = {"id": known.id, "presence": "paused" if known.presence == "paused" else "live"}
            fields["children"].append(child.model_dump() | update)
        return fields

    root = visit(mixture, config.mixture)
    for source in config.sources:
        if source.source not in seen:
            parent = kept_nodes.get(parents[source.id], root)
            # Which weights it may have is its new siblings' policy's to say, and it needs none.
            parent["children"].append(source.model_dump() | {"presence": "dropped", "weight": 1.0})
    return _validated(config, root, sequence_length)


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

    return _validated(config, visit(config.mixture.model_dump()))


def differences(old: RunConfig, new: RunConfig, fields: Sequence[str] = _SETTABLE) -> list[str]:
    """What another config changes, a line each, for people; of children only these fields."""
    found = []
    if old.sequence_length != new.sequence_length:
        found.append(f"sequence_length: {old.sequence_length} → {new.sequence_length}")
    before = {_key(child): child for child in _children(old)}
    for child in _children(new):
        was, name = before.get(_key(child)), child.name
        if was is None:
            found.append(f"{name}: new, weight {_text(child.weight)}")
            continue
        if was.presence != child.presence:
            found.append(f"{name}: {was.presence} → {child.presence}")
        found += [
            f"{name}: {field} {_text(getattr(was, field))} → {_text(getattr(child, field))}"
            for field in fields
            if field in type(child).model_fields and getattr(was, field) != getattr(child, field)
        ]
    now = {_key(child) for child in _children(new)}
    found += [f"{child.name}: gone" for key, child in before.items() if key not in now]
    return found


def content_of(config: RunConfig) -> dict[str, Any]:
    """The mixture as plain data, ids included; ``with_content`` reads it."""
    dumped: dict[str, Any] = _plain(config.mixture.model_dump(exclude_defaults=True))
    return {"mixture": dumped, "sequence_length": config.sequence_length}


def with_content(config: RunConfig, content: Mapping[str, Any]) -> RunConfig:
    """The config with the mixture of a ``content_of``. How bad rows of its sources are treated stays as it is: a run
    that a bad row has stopped gets to no revision."""
    known = {source.source: source for source in config.sources}

    def visit(child: dict[str, Any]) -> dict[str, Any]:
        if "children" in child:
            return child | {"children": [visit(below) for below in child["children"]]}
        source = known.get(child["source"])
        return child | {field: getattr(source, field) for field in _BAD_ROWS} if source is not None else child

    return _validated(config, visit(content["mixture"]), content["sequence_length"])


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

    found: dict[str, Any] = _plain(visit(config.mixture))
    return found


def places(config: RunConfig) -> Iterator[tuple[str, Child]]:
    """Every child that was not dropped, and its place, such as ``mixture.children.2``, as ``as_file`` shows it."""

    def below(node: NodeConfig, path: str) -> Iterator[tuple[str, Child]]:
        for i, child in enumerate(child for child in node.children if child.presence != "dropped"):
            yield f"{path}.children.{i}", child
            if isinstance(child, NodeConfig):
                yield from below(child, f"{path}.children.{i}")

    yield "mixture", config.mixture
    yield from below(config.mixture, "mixture")


def differences_of_files(in_force: RunConfig, file: RunConfig) -> list[str]:
    """What a mixture file changes of the mixture in force, a line each; whatever is paused stays so."""
    new = merged(in_force, _node(as_file(file), "mixture", file.catalog))
    return differences(in_force, new, fields=[field for field in _SETTABLE if field != "alias"])


def carry(state: State, old: RunConfig, new: RunConfig, grown: Sequence[int] = ()) -> State:
    """The state at a sample index, as the config that is in force from there on has it.

    Cursors and counters of sources stay; those of nodes are the sums of what lies below them now. Credits stay in
    their proportions, so that the new shares hold at once. A source that may give more than before (its ids are in
    ``grown`` where it got files) is no longer exhausted.
    """
    sources = []
    for source in new.sources:
        known = state.sources[source.id] if source.id < len(old.sources) else SourceState()
        if known.exhausted and (source.id in grown or _may_give_more(old, new, source.id)):
            known = replace(known, exhausted=False, dropped_tokens=0)
        if new.packing == "best_fit" and old.sequence_length != new.sequence_length:
            # Its samples would be others: a window of rows that has begun is packed again, from its first row.
            known = packed_again(known)
        sources.append(known)
    before = {
        (node.id, _key(child)): child_state
        for node, children in zip(old.nodes, state.nodes, strict=True)
        for child, child_state in zip(node.children, children, strict=True)
    }
    known_nodes = {node.id: node for node in old.nodes}
    found: dict[int, list[ChildState]] = {}

    def below(node: NodeConfig) -> ChildState:
        """Counters of all that lies below a node; exhausted where every child of it is. (One that ended for another
        reason, and ends again, is found out by its next pick.)"""
        children = []
        for child in node.children:
            if isinstance(child, NodeConfig):
                children.append(below(child))
            else:
                own = sources[child.id]
                children.append(ChildState(own.samples, own.tokens, 0, own.exhausted))
            was = before.get((node.id, _key(child)))
            if was is not None and known_nodes[node.id] == node:
                # Nothing changes here: the weights that the policy made stay; and a node's end, if its sources' does.
                ended = was.exhausted if isinstance(child, NodeConfig) and same(child) else children[-1].exhausted
                children[-1] = replace(children[-1], exhausted=ended, weight=was.weight, total=was.total)
        found[node.id] = children
        return ChildState(
            sum(child.samples for child in children),
            sum(child.tokens for child in children),
            0,
            all(child.exhausted for child in children),
        )

    def same(node: NodeConfig) -> bool:
        """Whether each child of a node that did not change is out, or not, as before."""
        return all(
            child.exhausted == before[node.id, _key(of)].exhausted
            for child, of in zip(found[node.id], node.children, strict=True)
        )

    below(new.mixture)
    in_force = Mixer(old, state.nodes).weights()
    earlier = {
        (node.id, _key(child)): weight
        for node in old.nodes
        for child, weight in zip(node.children, in_force[node.id], strict=True)
    }
    later = Mixer(new, [found[node.id] for node in new.nodes]).weights()
    nodes = []
    for node in new.nodes:
        keys = [(node.id, _key(child)) for child in node.children]
        owed = policy_of(node).revised(
            NodeChange(
                old_policy=policy_of(known_nodes[node.id]) if node.id in known_nodes else None,
                old=[before.get(key) for key in keys],
                new=found[node.id],
                old_weights=[earlier.get(key, 0) for key in keys],
                new_weights=later[node.id],
                pick_samples=new.pick_samples,
                pick_tokens=new.pick_tokens,
            )
        )
        nodes.append(tuple(replace(child, credit=own) for child, own in zip(found[node.id], owed, strict=True)))
    return replace(state, sources=tuple(sources), nodes=tuple(nodes))


def _may_give_more(old: RunConfig, new: RunConfig, source: int) -> bool:
    if new.epochs[source] > old.epochs[source]:
        return True
    least, most = old.sources[source].max_tokens, new.sources[source].max_tokens
    return least is not None and (most is None or most > least)


def _refuse_another(known: SourceConfig, found: SourceConfig) -> None:
    drawn = ("shuffle", "shuffle_window_rows", "lanes")
    for field in ("add_bos", "add_eot", "filter", "template", "fim", "loss_mask", "holdout", *drawn):
        if getattr(known, field) != getattr(found, field):
            makes = "another order of its rows" if field in drawn else "other documents of the same rows"
            raise ConfigError(
                f"{found.source!r}: {field} is {_text(getattr(known, field))} in this run and "
                f"{_text(getattr(found, field))} in the new mixture; that would make {makes}: put it back, or begin a "
                "new run"
            )


@dataclass(slots=True)
class _Place:
    """A child in the tree of plain data, and its parent there."""

    child: dict[str, Any]
    parent: dict[str, Any] | None


class _Tree:
    """The mixture as plain data that is being changed."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.root = config.mixture.model_dump()
        self._next_source, self._next_node = len(config.sources), config.nodes[-1].id + 1

    def set(self, setting: Setting, where: str) -> None:
        child = self._find(setting.child, f"{where}.child").child
        given = setting.model_dump(exclude_unset=True, exclude={"child", "paused"})
        for field, value in given.items():
            if field not in child:
                kind = "node" if "children" in child else "source"
                raise ConfigError(f"{where}.{field}: a {kind} has no {field}; found {value!r} for {setting.child!r}")
            child[field] = value
        if setting.paused is not None:
            child["presence"] = "paused" if setting.paused else "live"
        if not given and setting.paused is None:
            raise ConfigError(
                f"{where}: sets nothing of {setting.child!r}; expected one of {', '.join(_SETTABLE)}, paused"
            )

    def drop(self, name: str, where: str) -> None:
        place = self._find(name, where)
        if place.parent is None:
            raise ConfigError(f"{where}: {name!r} is the whole mixture; drop sources or nodes of it")
        self._drop_all(place.child)

    def _drop_all(self, child: dict[str, Any]) -> None:
        """With a node, all below it leaves."""
        child["presence"] = "dropped"
        for below in child.get("children", ()):
            self._drop_all(below)

    def add(self, addition: Addition, where: str) -> None:
        parent = self._find(addition.to, f"{where}.to").child
        if "children" not in parent:
            raise ConfigError(f"{where}.to: {addition.to!r} is a source; expected a node's alias or place")
        if "children" in addition.child or "policy" in addition.child:
            added: Child = _node(addition.child, f"{where}.child", self._config.catalog)
        else:
            added = _read(SourceConfig, addition.child, f"{where}.child", self._config.catalog)
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
            known = next((source for source in self._config.sources if source.source == child.source), None)
            if known is not None:
                return self._taken_back(known, child, where)
            fields = child.model_dump() | {"id": self._next_source}
            self._next_source += 1
            return fields
        fields = child.model_dump() | {"id": self._next_node}
        self._next_node += 1
        fields["children"] = [self._numbered(each, where) for each in child.children]
        return fields

    def _prune(self, node: dict[str, Any]) -> None:
        """Removes nodes of which every child went elsewhere."""
        for child in node["children"]:
            if "children" in child:
                self._prune(child)
        node["children"] = [child for child in node["children"] if child.get("children") != []]

    def _find(self, name: str, where: str, *, dropped: bool = False) -> _Place:
        found = [
            place
            for place, path in self._places(self.root, None, "mixture")
            if name in (place.child["alias"], place.child.get("source"), path)
            and (dropped or place.child["presence"] != "dropped")
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(
                f"{where}: {name!r} names {len(found)} children; use the place, such as mixture.children.0"
            )
        known = ", ".join(
            repr(place.child["alias"] or place.child.get("source") or path)
            for place, path in self._places(self.root, None, "mixture")
            if place.child["presence"] != "dropped"
        )
        raise ConfigError(f"{where}: the mixture has no {name!r}; it has {known}")

    def _places(self, child: dict[str, Any], parent: dict[str, Any] | None, path: str) -> Iterator[tuple[_Place, str]]:
        """Places are counted as ``as_file`` shows them; what was dropped has none."""
        yield _Place(child, parent), path
        number = count()
        for below in child.get("children", ()):
            at = "" if below["presence"] == "dropped" or not path else f"{path}.children.{next(number)}"
            yield from self._places(below, child, at)


_Model = TypeVar("_Model", bound=BaseModel)


def _validated(config: RunConfig, root: dict[str, Any], sequence_length: int | None = None) -> RunConfig:
    document = config.model_dump(exclude={"mixture"}) | {"mixture": root}
    if sequence_length is not None:
        document["sequence_length"] = sequence_length
    return _read(RunConfig, document, "", config.catalog)


def _node(document: dict[str, Any], where: str, catalog: Catalog) -> NodeConfig:
    return _read(NodeConfig, document, where, catalog)


def _read(model: type[_Model], document: dict[str, Any], where: str, catalog: Catalog) -> _Model:
    try:
        return model.model_validate(document, context=catalog)
    except ValidationError as error:
        raise ConfigError(explain(error, "", where)) from None


def _children(config: RunConfig) -> Iterator[Child]:
    yield config.mixture
    for node in config.nodes:
        yield from node.children


def _key(child: Child) -> tuple[type, int]:
    return type(child), child.id


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "not given" if value is None else str(value)


def _plain(value: Any) -> Any:
    """As JSON has it: no infinity."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return "inf" if value == float("inf") else value

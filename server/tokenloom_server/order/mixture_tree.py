"""Single changes of a mixture tree: what is set, dropped and added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from tokenloom_server.config.mixture_change import Addition, Setting
from tokenloom_server.config.node import Child
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.order.mixture_content import _read, field_text, node_from

#: What of a child may be set. Everything else (its spec, how its documents begin and end) makes it another source.
SETTABLE = ("weight", "policy", "on_exhausted", "epochs", "max_tokens", "unit", "interpolate", "alias")


@dataclass(slots=True)
class _TreePlace:
    """A child in the tree of plain data, and its parent there."""

    child: dict[str, Any]
    parent: dict[str, Any] | None


class MixtureTree:
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
                f"{where}: sets nothing of {setting.child!r}; expected one of {', '.join(SETTABLE)}, paused"
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
            added: Child = node_from(addition.child, f"{where}.child", self._config.catalog)
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
        refuse_another(known, source)
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

    def _find(self, name: str, where: str, *, dropped: bool = False) -> _TreePlace:
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

    def _places(
        self, child: dict[str, Any], parent: dict[str, Any] | None, path: str
    ) -> Iterator[tuple[_TreePlace, str]]:
        """Places are counted as ``as_file`` shows them; what was dropped has none."""
        yield _TreePlace(child, parent), path
        number = count()
        for below in child.get("children", ()):
            at = "" if below["presence"] == "dropped" or not path else f"{path}.children.{next(number)}"
            yield from self._places(below, child, at)


def refuse_another(known: SourceConfig, found: SourceConfig) -> None:
    drawn = ("shuffle", "shuffle_window_rows", "lanes")
    for field in ("add_bos", "add_eot", "filter", "template", "fim", "loss_mask", "holdout", *drawn):
        if getattr(known, field) != getattr(found, field):
            makes = "another order of its rows" if field in drawn else "other documents of the same rows"
            raise ConfigError(
                f"{found.source!r}: {field} is {field_text(getattr(known, field))} in this run and "
                f"{field_text(getattr(found, field))} in the new mixture; that would make {makes}: put it "
                "back, or begin a new run"
            )

"""A mixture file against the record of the run that it is of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.order_fields import (
    OUTSIDE_THE_ORDER,
    SOURCE_OUTSIDE_THE_ORDER,
    UNREVISABLE,
    fields_beside,
    order_fields,
)
from tokenloom_server.config.run import RunConfig
from tokenloom_server.errors import ConfigError

#: What a record counts that does not say it.
_POSITIONS = {"count": "positions"}


def differences(config: RunConfig, recorded: Mapping[str, Any]) -> dict[str, str]:
    """By field, how a mixture file differs from a run's record, both values named; empty for an empty record."""
    before = _POSITIONS | recorded.get("config", {})
    file = _POSITIONS | json.loads(canonical(order_fields(config.counting(before["count"]))))
    both = changes(before, file, default_of=_default_of) if recorded else ()
    return {
        path: f"the run began with {shown(old)}, the file has {shown(new)}"
        for path, old, new in both
    }


def changed_beside(config: RunConfig, recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields beside the order that have other values than in a record; none where that does not have them."""
    new = fields_beside(config)
    old = recorded.get("beside", new)
    paths = [path for path in sorted(old | new) if old.get(path) != new.get(path)]
    return tuple(
        f"{path}: was {shown(old.get(path))}, the file has {shown(new.get(path))} now"
        for path in paths
    )


def refuse(
    config: RunConfig, different: Mapping[str, str], refusal: type[Exception] = ConfigError
) -> None:
    """Raises ``refusal`` where there are differences."""
    if not different:
        return
    remedy = "put these back, or begin a new run under another name, such as one that is forked from this checkpoint"
    if all(_is_revisable(field, different) for field in different):
        remedy += (
            "; or make them a revision, from the next possible sample on: serve with --revise REASON, or "
            "`tokenloom runs --reload RUN --reason REASON`, or put these back and use `tokenloom mixture apply`"
        )
    elif set(different) <= {"sequence_length"}:
        remedy += "; `phases` plan such a change"
    raise refusal(
        f"the mixture file of run {config.run!r} differs from what the run began with:\n  "
        + "\n  ".join(f"{field}: {both}" for field, both in different.items())
        + f"\n{remedy}"
    )


def _is_revisable(field: str, different: Collection[str]) -> bool:
    """Whether a revision may change it: how a source is read stays, but another source may stand in its place."""
    match = re.match(r"(mixture(?:\.children\.\d+)*)\.(\w+)", field)
    return match is not None and (match[2] not in UNREVISABLE or f"{match[1]}.source" in different)


def began_with(config: RunConfig, record: str) -> RunConfig:
    """The config that a run's record is of. What decides no order (paths, names) is the mixture file's: names by spec,
    those of nodes by their place."""
    fields = json.loads(record)["config"]
    outside_by_spec = {
        source.source: {field: getattr(source, field) for field in SOURCE_OUTSIDE_THE_ORDER}
        for source in config.sources
    }

    def named(node: dict[str, Any], file: NodeConfig | None) -> dict[str, Any]:
        children: list[dict[str, Any]] = []
        for i, child in enumerate(node["children"]):
            same_place = file.children[i] if file is not None and i < len(file.children) else None
            if "source" in child:
                children.append(child | outside_by_spec.get(child["source"], {}))
            else:
                children.append(
                    named(child, same_place if isinstance(same_place, NodeConfig) else None)
                )
        return node | {"children": children, "alias": file.alias if file is not None else None}

    # What a record leaves out has its default, not the file's value.
    outside = config.model_dump(include=set(OUTSIDE_THE_ORDER))
    count = _POSITIONS if config.batching is None else {}
    return RunConfig.model_validate(
        {**count, **fields, **outside, "mixture": named(fields["mixture"], config.mixture)},
        context=config.catalog,
    )


def changes(
    old: Any, new: Any, path: str = "", default_of: Callable[[str], Any] = lambda path: None
) -> Iterator[tuple[str, Any, Any]]:
    """Of two documents, the path of each field with another value, and both of them. ``default_of``: the value of a
    field that one of them leaves out."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            key_path = f"{path}.{key}" if path else key
            default = default_of(key_path)
            yield from changes(old.get(key, default), new.get(key, default), key_path, default_of)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changes(before, after, f"{path}.{i}", default_of)
    elif old != new:
        yield path, old, new


def _default_of(path: str) -> Any:
    """The default of a field of the run that the record or the file leaves out."""
    field = RunConfig.model_fields.get(path)
    return (
        None
        if field is None or field.is_required()
        else field.get_default(call_default_factory=True)
    )


def shown(value: Any) -> str:
    """A field's value for people; of a list of children or files their names, since one of two such lists has more."""
    children = (
        value if isinstance(value, list) and all(isinstance(child, dict) for child in value) else []
    )
    names = [child.get("path") or child.get("source") or child.get("policy") for child in children]
    if names and all(names):
        text = f"{len(names)}: {', '.join(names)}"
    else:
        text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "…"

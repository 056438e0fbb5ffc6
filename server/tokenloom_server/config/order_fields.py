"""What the order of samples depends on: the fields of a run that its record and its digest hold."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.config.node import NodeConfig, descend
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError

#: Fields of a run that its order does not depend on. Where one changes between two launches, both values are said.
BESIDE_THE_ORDER = (
    *("window_micro_steps", "last_micro_step", "new_source_baseline", "mask_boundaries"),
    # Where a bad row ends a run, no order follows it; so the run may be resumed with another answer.
    *("on_bad_row", "max_bad_rows", "max_row_mib"),
)
#: These, and those that are compared in other ways: the content of the tokeniser has a digest of its own, and each
#: stream with a mixture of its own has its own record.
OUTSIDE_THE_ORDER = ("run", "tokenizer", "streams", *BESIDE_THE_ORDER)

#: Fields of a source that the order does not depend on.
SOURCE_OUTSIDE_THE_ORDER = ("alias", "on_bad_row", "max_bad_rows", "on_blank_line", "commit")
#: What a revision cannot change of a source: which documents its rows give, and in which order they are read.
DRAWN = ("shuffle", "shuffle_window_rows", "lanes")
UNREVISABLE = (
    *(
        "add_bos",
        "add_eot",
        "filter",
        "template",
        "chat_tools",
        "chat_format",
        "loss_on",
        "transform",
        "fim",
        "loss_mask",
        "holdout",
        "seen",
    ),
    *DRAWN,
)


def fields_beside(run: RunConfig) -> dict[str, Any]:
    """What decides no order, of the run, and of each node and source what is no default; by the names that people
    read."""
    fields = {name: getattr(run, name) for name in BESIDE_THE_ORDER}
    nodes = (
        (place, child)
        for place, child, _ in descend(run.mixture, "mixture")
        if isinstance(child, NodeConfig)
    )
    fields |= {f"{place}: alias": node.alias for place, node in nodes if node.alias is not None}
    for _, source in run.named_sources():
        own = source.model_dump(exclude_defaults=True, include={*SOURCE_OUTSIDE_THE_ORDER})
        fields |= {f"{source.source}: {name}": value for name, value in own.items()}
    return fields


def order_fields(run: RunConfig) -> dict[str, Any]:
    """The fields of a run that its order depends on, defaults omitted, numbers and specs normalised.

    Not among them is the content of the tokeniser and of the files, of which the record has digests of their own.
    """
    fields = run.model_dump(mode="json", exclude_defaults=True, exclude=set(OUTSIDE_THE_ORDER))
    fields["sequence_length"] = run.sequence_length
    if run.batching is not None:
        del fields["sequence_length"]
    fields.pop("count", None)
    if run.batching is None and run.count == "real":
        fields["count"] = "real"
    # The root has no siblings, so its weight decides nothing.
    fields["mixture"] = mixture_order_fields(run.mixture, run)
    for phase, phase_fields in zip(run.phases, fields.get("phases", []), strict=True):
        if phase.mixture is not None:
            phase_fields["mixture"] = mixture_order_fields(phase.mixture, run)
    return fields


def order_digest(run: RunConfig) -> str:
    """The digest of the fields that a run's order depends on."""
    return digest_of(order_fields(run))


def digest_of(fields: Any) -> str:
    """SHA-256 of ``order_fields``, in hex."""
    return hashlib.sha256(canonical(fields).encode()).hexdigest()


def _child_order_fields(child: NodeConfig | SourceConfig, run: RunConfig) -> dict[str, Any]:
    """The fields of a child: no name, no commit, and no override that says what the run says."""
    fields: dict[str, Any] = {"weight": weight_text(child.weight)}
    if isinstance(child, NodeConfig):
        return fields | mixture_order_fields(child, run)
    fields |= {"source": child.source, "epochs": _number(child.epochs)}
    own = child.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={*fields, "id", "presence", *SOURCE_OUTSIDE_THE_ORDER},
    )
    # An override equal to the run's own value changes nothing.
    plain = child.model_copy(update={"add_bos": None, "add_eot": None})
    inherited = {"add_bos": run.adds_bos(plain), "add_eot": run.adds_eot(plain)}
    return fields | {
        key: value
        for key, value in own.items()
        if value != inherited.get(key, getattr(run, key, None))
    }


def mixture_order_fields(node: NodeConfig, run: RunConfig) -> dict[str, Any]:
    """The fields of a tree that decide the order of its samples."""
    fields: dict[str, Any] = {
        "policy": node.policy,
        "on_exhausted": node.on_exhausted,
        "children": [_child_order_fields(child, run) for child in node.children],
    }
    if node.epochs != 1.0:
        fields["epochs"] = _number(node.epochs)
    # Only where they do not have their default, as with the fields of a source.
    for key in ("max_tokens", "unit", "interpolate"):
        if getattr(node, key) != NodeConfig.model_fields[key].default:
            fields[key] = getattr(node, key)
    return fields


def weight_text(weight: float | list[tuple[int, float]]) -> Any:
    """A weight as it is recorded: the shortest text of the number, and of those in points."""
    if isinstance(weight, list):
        return [[tokens, _number(value)] for tokens, value in weight]
    return _number(weight)


def _number(value: float) -> str:
    """The shortest text of a number: 1 and 1.0 are "1"."""
    return repr(value).removesuffix(".0")


# A mixture file against the record of the run that it is of.


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
    remedy = (
        "put these back, or begin a new run under another name (`run`), "
        "such as one that is forked from this checkpoint"
    )
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

"""What the order of samples depends on: the fields of a run that its record and its digest hold."""

from __future__ import annotations

import hashlib
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.config.node import NodeConfig, descend
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig

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

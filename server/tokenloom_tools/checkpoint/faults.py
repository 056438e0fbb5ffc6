"""What is missing in a checkpoint, or does not fit: each in one line that names the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenloom_proto.seal import SNAPSHOT_FORMAT, SNAPSHOT_VERSION
from tokenloom_server.core.state import MAX_COUNTER, ORDER_VERSION

from tokenloom_tools.checkpoint.content import (
    INDEX,
    NESTED,
    OLDER,
    SNAPSHOT,
    Child,
    Content,
    Node,
    Source,
)
from tokenloom_tools.checkpoint.probabilities import points, policy_of

_NEEDED = ("run", "stream", "sample_index", "digest", "total_tokens")
_NEEDED_WITH_STATE = (
    *(
        "run_uid",
        "generation",
        "seed",
        "order_version",
        "config_digest",
        "manifest_digest",
        "tokenizer",
    ),
    *("counts", "real_tokens"),
)


def faults(content: Content) -> list[str]:
    """All that is missing or suspicious."""
    if content.kind == INDEX:
        return [
            "resume_state: is missing: a restore can only skip so many samples from the beginning of the order"
        ]
    if content.kind == NESTED:
        return list(_of_nested(content))
    return [*_of_document(content), *_of_sources(content), *_of_sums(content), *_of_nodes(content)]


def _of_nested(content: Content) -> Iterator[str]:
    if content.mixture != "file":
        yield "policies and specs: missing, as in every state of nested datasets; --mixture FILE would say them"
    if "examples_per_dataset" not in content.document:
        yield "examples_per_dataset: missing: its loader would count from 0 again; here it follows from child_states"
    for node in content.nodes:
        yield from (
            f"{node.name}: nothing counts what {own.name} gave"
            for own in node.children
            if own.samples is None
        )
    samples = sum(child.samples or 0 for node in content.nodes[:1] for child in node.children)
    if not content.nodes:
        yield "child_states: found no list of them; expected one, of what each dataset says"
    elif content.sample_index not in (None, samples):
        yield f"current_example_count: found {content.sample_index}, but its datasets gave {samples}"


def _of_document(content: Content) -> Iterator[str]:
    document = content.document
    if content.damage is not None:
        yield f"checksum: {content.damage}"
    if content.kind == OLDER:
        return
    if document.get("format") != SNAPSHOT_FORMAT:
        yield f"format: found {document.get('format')!r}, expected {SNAPSHOT_FORMAT!r}"
    if document.get("version") != SNAPSHOT_VERSION:
        yield f"version: found {document.get('version')!r}, expected {SNAPSHOT_VERSION}"
    resume = document.get("resume_state")
    if isinstance(resume, Mapping) and resume.get("version") != SNAPSHOT_VERSION:
        yield f"resume_state.version: found {resume.get('version')!r}, expected {SNAPSHOT_VERSION}"
    if document.get("order_version") not in (None, ORDER_VERSION):
        yield f"order_version: found {document['order_version']!r}, expected {ORDER_VERSION}"
    needed = _NEEDED if resume is None else (*_NEEDED, *_NEEDED_WITH_STATE)
    missing = [field for field in needed if document.get(field) is None]
    if missing:
        yield f"{', '.join(missing)}: missing"
    if resume is not None and not (
        isinstance(resume, Mapping) and isinstance(resume.get("datasets"), list)
    ):
        yield "resume_state.datasets: expected a list of sources; there is none"
    if resume is None and document.get("sample_index"):
        yield f"resume_state: is missing, though sample_index is {document['sample_index']}"
    if (
        content.counted_at is not None
        and content.sample_index is not None
        and content.counted_at > content.sample_index
    ):
        yield f"resume_state.sample_index: {content.counted_at} lies after sample_index {content.sample_index}"
    if resume is not None and content.mixture != "checkpoint":
        yield "resume_state.mixture: is missing: nothing says which child is which, and its weight"


def _of_sources(content: Content) -> Iterator[str]:
    for i, (entry, source) in enumerate(zip(_entries(content), content.sources, strict=True)):
        where = f"resume_state.datasets.{i} ({source.name})"
        if source.unknown:
            continue
        fields = ["spec", *_place_fields(content, entry), "token_offset"]
        if content.kind == SNAPSHOT:
            fields += ["id", "samples", "rows"]
        for field in fields:
            value = entry.get(field)
            if value is None:
                yield f"{where}: {field}: missing" + (
                    ", which counts as 0" if field == "token_offset" else ""
                )
            elif field not in ("spec", "shard") and (
                type(value) is not int or not 0 <= value <= MAX_COUNTER
            ):
                yield f"{where}: {field}: found {value!r}, expected an integer from 0 to 2^53 − 1"
        if source.samples and not _place_fields(content, entry):
            yield f"{where}: nothing says where it stands, though {source.samples} samples were taken"
        if source.token_in_row and entry.get("packed_samples"):
            yield f"{where}: row_token_offset: found {source.token_in_row} beside packed_samples, expected one of them"
        if source.samples and not source.tokens:
            yield f"{where}: token_offset: found {source.tokens}, though {source.samples} samples were taken"
    known = [source for source in content.sources if not source.unknown]
    if any(each.row or each.epoch or each.rows or each.exhausted for each in known) and not any(
        source.tokens or source.samples for source in known
    ):
        yield "resume_state.datasets: every token_offset is 0 or missing, though the cursors show progress"


def _place_fields(content: Content, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """What an entry needs to say where its source stands; at its beginning a snapshot says nothing."""
    if content.kind == OLDER:
        return ("row_offset",)
    for fields in (
        ("shard", "shard_index", "row_offset"),
        ("window", "window_row"),
        ("epoch_rows",),
    ):
        if any(field in entry for field in fields):
            return ("epoch", *fields)
    return ()


def _of_sums(content: Content) -> Iterator[str]:
    if content.kind != SNAPSHOT or content.counted_at is None:
        return
    known = [source for source in content.sources if not source.unknown]
    left = content.left_samples
    samples = sum(source.samples or 0 for source in known)
    if samples != content.counted_at - left:
        total = samples + left
        yield f"resume_state.sample_index: found {content.counted_at}, but the sources' samples add up to {total}"
    tokens, total = (
        sum(source.tokens or 0 for source in known),
        content.document["resume_state"].get("total_tokens"),
    )
    if tokens + content.clock_offset != total and not left:
        clock = f", and clock_offset is {content.clock_offset}" if content.clock_offset else ""
        yield f"resume_state.total_tokens: found {total}, but the sources' tokens add up to {tokens}{clock}"


def _of_nodes(content: Content) -> Iterator[str]:
    if content.kind == OLDER:
        yield "resume_state.nodes: missing: an older loader counts no nodes; an import makes them from the sources"
        return
    resume = content.document.get("resume_state")
    if not isinstance(resume, Mapping):
        return
    counted = resume.get("nodes")
    if not isinstance(counted, list) or not counted:
        yield "resume_state.nodes: missing: without the counters every node would begin anew"
        return
    if content.mixture and len(counted) != len(content.nodes):
        yield f"resume_state.nodes: {len(counted)} nodes, but the mixture has {len(content.nodes)}"
    for node in content.nodes:
        yield from _of_node(content, node)
    rows = [child for node in content.nodes for child in node.children]
    if content.counted_at and not any(child.samples or child.tokens for child in rows):
        yield f"resume_state.nodes: all counters are 0, though {content.counted_at} samples were taken"


def _lacks_weights(content: Content, node: Node) -> bool:
    """Whether weights that the policy makes itself are missing: before the first sample there are none yet."""
    began = (content.imported or {}).get("sample_index", 0)
    policy = policy_of(node)
    return (
        policy is not None
        and policy.makes_weights
        and content.counted_at != began
        and any(child.samples for child in node.children)
        and not any(child.weight for child in node.children)
    )


def _of_node(content: Content, node: Node) -> Iterator[str]:
    where = f"resume_state.nodes.{node.id} ({node.name})"
    by_id = {other.id: other for other in content.nodes}
    sources = {source.id: source for source in content.sources if source.id is not None}
    missing = [
        child.name for child in node.children if child.samples is None or child.tokens is None
    ]
    if missing:
        yield f"{where}: counters are missing for {', '.join(missing)}"
        return
    if _lacks_weights(content, node):
        yield f"{where}: the weights in force are missing; they would be made anew from the counters"
    issued = sum(child.samples or 0 for child in node.children)
    if (
        node.id == 0
        and content.counted_at is not None
        and issued != content.counted_at - content.left_samples
    ):
        yield f"{where}: its children have {issued} samples, but resume_state.sample_index is {content.counted_at}"
    for child in node.children:
        if child.id is not None:
            own = _of_own(by_id.get(child.id) if child.is_node else sources.get(child.id))
            if own is None:
                yield f"{where}: {child.name}: the checkpoint has no counters of its own"
            elif own != (child.samples, child.tokens):
                yield (
                    f"{where}: {child.name}: counts {child.samples} samples and {child.tokens} tokens, but it says "
                    f"itself {own[0]} and {own[1]}"
                )
        if content.mixture == "checkpoint" and points(child.configured) is None:
            yield f"resume_state.mixture.{node.id}: {child.name}: weight: found {child.configured!r}, expected a number"
        if child.total and child.total < (child.samples or 0):
            yield f"{where}: {child.name}: total: found {child.total} samples, but {child.samples} were given"
        if child.credit is None:
            yield f"{where}: {child.name}: credit: missing, or no integer of 64 bits"
        elif abs(child.credit) > MAX_COUNTER:
            yield f"{where}: {child.name}: credit: found {child.credit}, expected one within ±2^53"


def _of_own(there: Node | Source | Child | None) -> tuple[int, int] | None:
    """The samples and tokens that a row, or a node of all its children, says; None where it does not."""
    rows = there.children if isinstance(there, Node) else [there]
    if any(row is None or row.samples is None or row.tokens is None for row in rows):
        return None
    return sum(row.samples or 0 for row in rows if row), sum(row.tokens or 0 for row in rows if row)


def _entries(content: Content) -> list[Mapping[str, Any]]:
    resume = content.document.get("resume_state")
    datasets = resume.get("datasets") if isinstance(resume, Mapping) else None
    return (
        [entry for entry in datasets if isinstance(entry, dict)]
        if isinstance(datasets, list)
        else []
    )

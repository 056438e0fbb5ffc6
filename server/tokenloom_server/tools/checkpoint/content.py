"""What a state of data says, field by field, whatever is missing of it: nothing is refused, and nothing guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.order.snapshot_v1 import upgraded
from tokenloom_server.tools.checkpoint.file import DataState

#: No counter of any loader is beyond this; with larger ones nothing can be computed.
_MOST = 2**64

SNAPSHOT, OLDER, INDEX = "snapshot", "older payload", "sample index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source. What the checkpoint does not say is None; ``tokens`` is what it calls ``token_offset``."""

    id: int | None
    spec: str
    alias: str | None
    epoch: int | None
    shard: str | None
    window: int | None
    """In place of a shard, where rows are shuffled; the row counts within it."""
    row: int | None
    """In the shard or window; where there is neither, of the rows in batches that the epoch gives."""
    token_in_row: int | None
    samples: int | None
    rows: int | None
    tokens: int | None
    share: float | None
    """Of the tokens of all sources."""
    exhausted: bool
    skipped_samples: int
    skipped_rows: int
    skipped_tokens: int
    unknown: bool
    """Of an older payload, and in no mixture of the run since."""

    @property
    def name(self) -> str:
        return self.alias or self.spec

    @property
    def skips(self) -> bool:
        """Whether a restore jumped over some of it; ``samples``, ``rows`` and ``tokens`` have that in them."""
        return bool(self.skipped_samples or self.skipped_rows or self.skipped_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What a node knows of one of its children; ``id`` counts nodes or sources, None where no mixture says it."""

    is_node: bool
    id: int | None
    name: str
    configured: Any
    """The weight in the mixture, as text or [tokens, weight] points; None where none is known."""
    presence: str
    samples: int | None
    tokens: int | None
    credit: int | None
    exhausted: bool
    weight: int | None
    """The integer weight in force, where the policy makes it itself."""
    total: int | None
    """The estimate of all that the child will give, in samples, where the policy makes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One inner node; ``policy`` is None where no mixture is known."""

    id: int
    name: str
    policy: str | None
    interpolate: str
    children: tuple[Child, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A state of data. ``sample_index`` is the checkpoint's place; the counters of sources and nodes are those at the
    state boundary ``counted_at``, at or before it."""

    file: str
    where: str
    kind: str
    run: str | None = None
    run_uid: str | None = None
    stream: str | None = None
    generation: int | None = None
    seed: int | None = None
    config_digest: str | None = None
    manifest_digest: str | None = None
    sample_index: int | None = None
    digest: str | None = None
    total_tokens: int | None = None
    counted_at: int | None = None
    sequence_length: int | None = None
    imported: Mapping[str, Any] | None = None
    """Where the order began from an older data loader's checkpoint."""
    forked: Mapping[str, Any] | None = None
    """The run that this one was forked from, and where; ``left_samples`` of it are of sources that this one lacks."""
    revisions: tuple[int, ...] = ()
    """The sample indices of the revisions that it carries: the one in force, and those that follow shortly."""
    mixture: str | None = None
    """What says which child is which: ``checkpoint`` or ``file``; None for nothing."""
    sources: tuple[Source, ...] = ()
    nodes: tuple[Node, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    """All that was found."""
    damage: str | None = None


def read(path: Path, state: DataState, mixture: RunConfig | None = None) -> Content:
    """The content of a checkpoint; ``mixture`` says which child is which where the checkpoint does not."""
    document = state.document
    is_snapshot = "format" in document or state.damage is not None
    if is_snapshot and "resume_state" in document:
        document = {**document, "resume_state": upgraded(document["resume_state"], None)}
    resume = _mapping(document.get("resume_state"))
    entries = [entry for entry in _list(resume.get("datasets")) if isinstance(entry, dict)]
    kind = SNAPSHOT if is_snapshot else OLDER if entries else INDEX
    index, tokens = _count(resume.get("sample_index")), _count(resume.get("total_tokens"))
    sources = _sources(entries, mixture)
    tree, said_by = _tree(resume, mixture)
    # None where it changed during the run.
    length = tokens // index if index and tokens and not tokens % index else None
    nodes = _nodes(resume, tree, sources, mixture)
    if kind == OLDER and said_by == "file" and mixture is not None:
        nodes = _summed(nodes, sources, mixture)
    return Content(
        file=str(path),
        where=state.where,
        kind=kind,
        run=_text(document.get("run")),
        run_uid=_text(document.get("run_uid")),
        stream=_text(document.get("stream")),
        generation=_count(document.get("generation")),
        seed=_count(document.get("seed")),
        config_digest=_text(document.get("config_digest")),
        manifest_digest=_text(document.get("manifest_digest")),
        sample_index=_count(document.get("sample_index", resume.get("sample_index"))),
        digest=_text(document.get("digest")),
        total_tokens=_count(document.get("total_tokens")),
        counted_at=index,
        sequence_length=length or (mixture.sequence_length if mixture is not None else None),
        imported=_mapping(resume.get("imported")) or None,
        forked=_mapping(resume.get("origin")) or None,
        revisions=tuple(
            index
            for revision in _list(resume.get("revisions"))
            if (index := _count(_mapping(revision).get("sample_index"))) is not None
        ),
        mixture=said_by,
        sources=sources,
        nodes=nodes,
        document=document,
        damage=state.damage,
    )


def _sources(entries: Sequence[Mapping[str, Any]], mixture: RunConfig | None) -> tuple[Source, ...]:
    ids = {source.source: source for source in mixture.sources} if mixture is not None else {}
    total = sum(_count(entry.get("token_offset")) or 0 for entry in entries if not entry.get("unknown"))
    sources = []
    for entry in entries:
        spec, tokens = str(entry.get("spec")), _count(entry.get("token_offset"))
        known = ids.get(spec)
        number = _count(entry.get("id"))
        sources.append(
            Source(
                id=number if number is not None or known is None else known.id,
                spec=spec,
                alias=_text(entry.get("alias")) or (known.alias if known is not None else None),
                epoch=_count(entry.get("epoch", 0 if "id" in entry else None)),
                shard=_text(entry.get("shard")),
                window=_count(entry.get("window")),
                row=_count(entry.get("row_offset", entry.get("window_row", entry.get("epoch_rows")))),
                token_in_row=_count(entry.get("row_token_offset")),
                samples=_count(entry.get("samples")),
                rows=_count(entry.get("rows")),
                tokens=tokens,
                share=tokens / total if tokens is not None and total and not entry.get("unknown") else None,
                exhausted=entry.get("exhausted") is True,
                skipped_samples=_count(entry.get("skipped_samples")) or 0,
                skipped_rows=_count(entry.get("skipped_rows")) or 0,
                skipped_tokens=_count(entry.get("skipped_tokens")) or 0,
                unknown=entry.get("unknown") is True,
            )
        )
    return tuple(sources)


def _tree(resume: Mapping[str, Any], mixture: RunConfig | None) -> tuple[dict[int, dict[str, Any]], str | None]:
    """The mixture as a snapshot writes it, by node id, and where it is from."""
    written = {node["id"]: node for node in _list(resume.get("mixture")) if _is_node(node)}
    if written:
        return written, "checkpoint"
    if mixture is not None:
        return {node.id: _written(node) for node in mixture.nodes}, "file"
    return {}, None


def _is_node(node: Any) -> bool:
    said = _mapping(node)
    children = said.get("children")
    return (
        _count(said.get("id")) is not None
        and isinstance(children, list)
        and all(isinstance(child, list) and len(child) > 1 for child in children)
    )


def _written(node: NodeConfig) -> dict[str, Any]:
    children = [[2 * child.id + isinstance(child, NodeConfig), child.weight, child.presence] for child in node.children]
    return {"policy": node.policy, "alias": node.alias, "children": children, "interpolate": node.interpolate}


def _nodes(
    resume: Mapping[str, Any],
    tree: Mapping[int, Mapping[str, Any]],
    sources: Sequence[Source],
    mixture: RunConfig | None,
) -> tuple[Node, ...]:
    """The nodes of the mixture with what the state counts of them; without a mixture, the counters alone."""
    counted = [_list(children) for children in _list(resume.get("nodes"))]
    names = {source.id: source.name for source in mixture.sources} if mixture is not None else {}
    names |= {source.id: source.name for source in sources if source.id is not None}
    # The state's nodes are those of the mixture in the order of their ids.
    numbers = sorted(tree) if tree else range(len(counted))
    nodes = []
    for place, number in enumerate(numbers):
        rows = counted[place] if place < len(counted) else []
        said = tree.get(number, {})
        children = _list(said.get("children")) or [[None]] * len(rows)
        nodes.append(
            Node(
                id=number,
                name=_name(tree, number),
                policy=_text(said.get("policy")),
                interpolate=_text(said.get("interpolate")) or "linear",
                children=tuple(
                    _child(child, rows[i] if i < len(rows) else None, i, tree, names)
                    for i, child in enumerate(children)
                ),
            )
        )
    return tuple(nodes)


def _child(
    said: Sequence[Any], counted: Any, place: int, tree: Mapping[int, Mapping[str, Any]], names: Mapping[int, str]
) -> Child:
    row = [*(counted if isinstance(counted, list) else []), *[None] * 6][:6]
    number = _count(said[0])
    own, is_node = divmod(number, 2) if number is not None else (None, 0)
    name = f"child {place}"
    if own is not None:
        name = _name(tree, own) if is_node else names.get(own, f"source {own}")
    return Child(
        is_node=bool(is_node),
        id=own,
        name=name,
        configured=said[1] if len(said) > 1 else None,
        presence=str(said[2]) if len(said) > 2 else "live",
        samples=_count(row[0]),
        tokens=_count(row[1]),
        credit=row[2] if type(row[2]) is int and abs(row[2]) < _MOST else None,
        exhausted=row[3] in (1, True),
        weight=_count(row[4]),
        total=_count(row[5]),
    )


def _summed(nodes: Sequence[Node], sources: Sequence[Source], mixture: RunConfig) -> tuple[Node, ...]:
    """An older payload counts its sources only: what an import makes of that for the nodes above them."""
    samples = {
        source.id: (source.tokens or 0) // mixture.sequence_length for source in sources if source.id is not None
    }
    by_id = {node.id: node for node in nodes}

    def below(child: Child) -> int:
        assert child.id is not None, "a mixture gives every child its id"
        return sum(map(below, by_id[child.id].children)) if child.is_node else samples.get(child.id, 0)

    def counted(child: Child) -> Child:
        count = below(child)
        return replace(child, samples=count, tokens=count * mixture.sequence_length)

    return tuple(replace(node, children=tuple(map(counted, node.children))) for node in nodes)


def _name(tree: Mapping[int, Mapping[str, Any]], number: int) -> str:
    return _text(tree.get(number, {}).get("alias")) or ("the root" if number == 0 else f"node {number}")


def left_samples(content: Content) -> int:
    """Samples before the state that none of its sources gave: those of a forked run's parent alone."""
    return _count((content.forked or {}).get("left_samples")) or 0


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []

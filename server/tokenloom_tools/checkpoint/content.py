"""What a state of data says, field by field, whatever is missing of it: nothing is refused, and nothing guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from tokenloom_proto.seal import canonical
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.mixing.mixer import mixer_at
from tokenloom_server.order import foreign_payload
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.foreign_checkpoint import resume_point
from tokenloom_server.order.foreign_payload import as_resume_state, is_nested, listed
from tokenloom_server.order.timeline import Timeline

from tokenloom_tools.checkpoint.file import DataState

#: No counter of any loader is beyond this (with larger ones nothing can be computed), and no mixture is deeper.
_MOST, _MOST_LEVELS = 2**64, 64

SNAPSHOT, OLDER, NESTED, INDEX = "snapshot", "older payload", "nested state", "sample index"


def _integer(value: Any) -> int | None:  # what is not of its kind counts as missing, here and below
    return value if type(value) is int and abs(value) < _MOST else None


def _count(value: Any) -> int | None:
    return value if _integer(value) is not None and value >= 0 else None


def _count_or_zero(value: Any) -> int:
    return _count(value) or 0


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _flag(value: Any) -> bool:
    return value in (1, True)


_Integer = Annotated[int | None, BeforeValidator(_integer)]
_Count = Annotated[int | None, BeforeValidator(_count)]
_Text = Annotated[str | None, BeforeValidator(_text)]
_Counts = Annotated[Mapping[str, _Count], BeforeValidator(_mapping)]
_Flag = Annotated[bool, BeforeValidator(_flag)]


class _Part(BaseModel):
    """A part of a checkpoint; fields that it has beside these are left out."""

    model_config = ConfigDict(frozen=True)


class Source(_Part):
    """One source, read from its entry in the checkpoint. What that does not say is None."""

    id: _Count = None
    spec: Annotated[str, BeforeValidator(str)] = "None"
    alias: _Text = None
    epoch: _Count = None
    shard: _Text = None
    window: _Count = None
    """In place of a shard, where rows are shuffled; the row counts within it."""
    row: _Count = Field(
        None, validation_alias=AliasChoices("row_offset", "window_row", "epoch_rows")
    )
    """In the shard or window; where there is neither, of the rows in batches that the epoch gives."""
    token_in_row: _Count = Field(None, validation_alias="row_token_offset")
    samples: _Count = None
    rows: _Count = None
    tokens: _Count = Field(None, validation_alias="token_offset")
    share: float | None = None
    """Of the tokens of all sources."""
    node_samples: int | None = Field(None, exclude=True)
    """The samples that nodes count, where their own counters do not say it."""
    exhausted: _Flag = False
    skipped_samples: Annotated[int, BeforeValidator(_count_or_zero)] = 0
    skipped_rows: Annotated[int, BeforeValidator(_count_or_zero)] = 0
    skipped_tokens: Annotated[int, BeforeValidator(_count_or_zero)] = 0
    unknown: _Flag = False
    """Of an older payload, and in no mixture of the run since."""

    @property
    def name(self) -> str:
        return self.alias or self.spec

    @property
    def skips(self) -> bool:
        """Whether a restore jumped over some of it; ``samples``, ``rows`` and ``tokens`` have that in them."""
        return bool(self.skipped_samples or self.skipped_rows or self.skipped_tokens)


class Child(_Part):
    """What a node knows of one of its children; ``id`` counts nodes or sources, None where no mixture says it."""

    is_node: bool
    id: int | None
    name: str
    configured: Any = None
    """The weight in the mixture, as text or [tokens, weight] points; None where none is known."""
    presence: Annotated[str, BeforeValidator(str)] = "live"
    samples: _Count = None
    tokens: _Count = None
    credit: _Integer = None
    exhausted: _Flag = False
    weight: _Count = None
    """The integer weight in force, where the policy makes it itself."""
    total: _Count = None
    """The estimate of all that the child will give, in samples, where the policy makes one."""


#: A child's counters, in the order in which a state writes them.
_COUNTERS = ("samples", "tokens", "credit", "exhausted", "weight", "total")
#: A child's fields, in the order in which a mixture writes them after the child's number.
_WRITTEN = ("configured", "presence")


class Node(_Part):
    """One inner node; ``policy`` is None where no mixture is known."""

    id: int
    name: str
    policy: str | None
    interpolate: str
    children: tuple[Child, ...]


class Content(_Part):
    """A state of data. ``sample_index`` is the checkpoint's place; the counters of sources and nodes are those at the
    state boundary ``counted_at``, at or before it."""

    file: str
    where: str
    kind: str
    run: _Text = None
    run_uid: _Text = None
    stream: _Text = None
    generation: _Count = None
    seed: _Count = None
    config_digest: _Text = None
    manifest_digest: _Text = None
    sample_index: _Count = None
    digest: _Text = None
    total_tokens: _Count = None
    counted_at: _Count = None
    sequence_length: int | None = None
    imported: Mapping[str, Any] | None = None
    """Where the order began from an older data loader's checkpoint."""
    #: By how many tokens ``total_tokens`` exceeds those of the samples: that checkpoint's token clock goes on.
    clock_offset: int = 0
    forked: Mapping[str, Any] | None = None
    """The run that this one was forked from, and where; ``left_samples`` of it are of sources that this one lacks."""
    revisions: tuple[int, ...] = ()
    """The sample indices of the revisions that it carries: the one in force, and those that follow shortly."""
    mixture: str | None = None
    """What says which child is which: ``checkpoint`` or ``file``; None for nothing."""
    sources: tuple[Source, ...] = ()
    counts: Annotated[Mapping[str, _Counts], BeforeValidator(_mapping)] = Field({})
    """What each source gave up to the sample index, by spec; empty where the checkpoint does not say it."""
    nodes: tuple[Node, ...] = ()
    document: Mapping[str, Any] = Field(default_factory=dict, exclude=True)
    """All that the checkpoint says."""
    damage: str | None = None

    @property
    def left_samples(self) -> int:
        """Samples before the state that none of its sources gave, those of a forked run's parent alone; less those that
        have no sample index, since they were passed over."""
        passed = [
            listed(skip)
            for skip in listed(_mapping(self.document.get("resume_state")).get("skips"))
        ]
        left = (self.forked or {}).get("left_samples")
        return (_integer(left) or 0) - sum(
            _count_or_zero(skip[1]) for skip in passed if len(skip) == 3
        )


class _WrittenNode(_Part):
    """A node as a snapshot writes it, with 2 × id + whether it is a node, weight and presence of each child."""

    id: Annotated[int, Field(strict=True, ge=0, lt=_MOST)]
    policy: _Text = None
    alias: _Text = None
    interpolate: _Text = None
    children: list[Annotated[list[Any], Field(min_length=2)]]

    @property
    def name(self) -> str:
        return self.alias or _unnamed(self.id)


#: The nodes of the mixture by their ids.
_Nodes = dict[int, _WrittenNode]
#: By a child's number in the mixture, its counters.
_Given = Mapping[int | None, Mapping[str, int | None]]


def read(
    path: Path,
    state: DataState,
    mixture: RunConfig | None = None,
    factory: PipelineFactory | None = None,
    *,
    base_dir: Path = Path(),
    at_index: bool = False,
) -> Content:
    """The content of a checkpoint; ``mixture``, of the folder ``base_dir``, says which child is which where that does
    not, and the ``factory`` of its order how much its data have. With ``at_index`` nodes count up to the checkpoint's
    own place, where it says what each source gave till there.

    Raises ``SnapshotInvalid`` for the state of nested datasets of which the mixture has another tree, and for one from
    which the factory's order does not go on.
    """
    document = state.document
    is_snapshot = "format" in document or state.damage is not None
    nested = is_nested(document)
    resume = (
        as_resume_state(document, mixture) if nested else _mapping(document.get("resume_state"))
    )
    entries = [entry for entry in listed(resume.get("datasets")) if isinstance(entry, dict)]
    kind = SNAPSHOT if is_snapshot else NESTED if nested else OLDER if entries else INDEX
    if factory is not None and kind != INDEX:
        resume = {**resume, "nodes": _weighed(document, kind, factory)}
    clock_offset = resume["clock_offset"] if type(resume.get("clock_offset")) is int else 0
    index, tokens = (
        _count(resume.get("sample_index")),
        (_count(resume.get("total_tokens")) or 0) - clock_offset,
    )
    counts = _mapping(document.get("counts")) if at_index else {}
    sources = _sources(entries, counts, mixture, base_dir)
    written, mixture_from = _written_nodes(resume, mixture)
    # None where it changed during the run.
    length = tokens // index if index and tokens and not tokens % index else None
    length = length or (mixture.sequence_length if mixture is not None else None)
    gave = _given(sources, written, length) if counts or (kind == OLDER and factory is None) else {}
    nodes = _nodes(resume, written, gave, sources, mixture)
    return Content.model_validate(
        {
            "sample_index": resume.get("sample_index"),
            "total_tokens": resume.get("total_tokens"),
            **document,
            "file": str(path),
            "where": state.where,
            "kind": kind,
            "counted_at": document.get("sample_index") if counts else index,
            "sequence_length": length,
            "imported": _mapping(resume.get("imported")) or None,
            "clock_offset": clock_offset,
            "forked": _mapping(resume.get("origin")) or None,
            "revisions": _revisions(resume),
            "mixture": mixture_from,
            "sources": sources,
            "nodes": nodes,
            "document": document,
            "damage": state.damage,
        }
    )


def _revisions(resume: Mapping[str, Any]) -> list[int]:
    """The sample indices of a state's revisions but for those that only skip."""
    changes = [_mapping(revision) for revision in listed(resume.get("revisions"))]
    changes = [revision for revision in changes if "skips" not in _mapping(revision.get("content"))]
    return [
        index for revision in changes if (index := _count(revision.get("sample_index"))) is not None
    ]


def _sources(
    entries: Sequence[Mapping[str, Any]],
    counts: Mapping[str, Any],
    mixture: RunConfig | None,
    base_dir: Path,
) -> tuple[Source, ...]:
    # A snapshot does not write where a source stands at its beginning; a field of another tool is no share.
    sources = [
        Source.model_validate({"epoch": 0 if "id" in entry else None, **entry, "share": None})
        for entry in entries
    ]
    known = {each.source: each for each in mixture.sources} if mixture is not None else {}
    total = sum(source.tokens or 0 for source in sources if not source.unknown)
    named = []
    for source in sources:
        share = (
            source.tokens / total
            if source.tokens is not None and total and not source.unknown
            else None
        )
        update: dict[str, Any] = {"share": share}
        if counts:
            there = _mapping(counts.get(source.spec))
            update["node_samples"] = _count_or_zero(there.get("samples")) + source.skipped_samples
        elif source.samples is None and mixture is not None:
            update["node_samples"] = (source.tokens or 0) // mixture.sequence_length
        spec = (
            foreign_payload.normalised(source.spec, mixture, base_dir)
            if mixture is not None
            else source.spec
        )
        if (config := known.get(spec)) is not None:
            update |= {
                "id": config.id if source.id is None else source.id,
                "alias": source.alias or config.alias,
            }
        named.append(source.model_copy(update=update))
    return tuple(named)


def _written_nodes(
    resume: Mapping[str, Any], mixture: RunConfig | None
) -> tuple[_Nodes, str | None]:
    """The nodes of the mixture, and what says them."""
    nodes: _Nodes = {}
    for written in listed(resume.get("mixture")):
        with suppress(ValidationError):
            node = _WrittenNode.model_validate(written)
            nodes[node.id] = node
    if nodes:
        return nodes, "checkpoint"
    if mixture is not None:
        return {node.id: _written(node) for node in mixture.nodes}, "file"
    return {}, None


def _written(node: NodeConfig) -> _WrittenNode:
    children = [
        [2 * child.id + isinstance(child, NodeConfig), child.weight, child.presence]
        for child in node.children
    ]
    return _WrittenNode(
        id=node.id,
        policy=node.policy,
        alias=node.alias,
        interpolate=node.interpolate,
        children=children,
    )


def _given(sources: Sequence[Source], written: _Nodes, length: int | None) -> _Given:
    """What each child of the mixture gave, where the sources say it."""
    numbers = {
        number: [_count(child[0]) or 0 for child in node.children]
        for number, node in written.items()
    }
    samples = {own: 0 for below in numbers.values() for own in below}
    samples |= {2 * own.id: own.node_samples or 0 for own in sources if own.id is not None}
    # Once for each level: a node may hold one with a lower id.
    for _ in range(min(len(written), _MOST_LEVELS)):
        samples |= {
            2 * node + 1: sum(samples[own] for own in below) for node, below in numbers.items()
        }
    return {
        own: {"samples": gave, "tokens": gave * length if length else None}
        for own, gave in samples.items()
    }


def _nodes(
    resume: Mapping[str, Any],
    written: _Nodes,
    given: _Given,
    sources: Sequence[Source],
    mixture: RunConfig | None,
) -> tuple[Node, ...]:
    """The nodes of the mixture with what the state counts of them, or what is ``given``; without a mixture, the
    counters alone."""
    counted = [listed(children) for children in listed(resume.get("nodes"))]
    names = {source.id: source.name for source in mixture.sources} if mixture is not None else {}
    names |= {source.id: source.name for source in sources if source.id is not None}
    nodes = []
    # The state's nodes are those of the mixture in the order of their ids.
    for position, number in enumerate(sorted(written) if written else range(len(counted))):
        rows = counted[position] if position < len(counted) else []
        node = written.get(number)
        children = (node.children if node is not None else None) or [[None]] * len(rows)
        nodes.append(
            Node(
                id=number,
                name=node.name if node is not None else _unnamed(number),
                policy=node.policy if node is not None else None,
                interpolate=(node.interpolate if node is not None else None) or "linear",
                children=tuple(
                    _child(child, rows[i] if i < len(rows) else None, i, written, names, given)
                    for i, child in enumerate(children)
                ),
            )
        )
    return tuple(nodes)


def _child(
    entry: Sequence[Any],
    counted: Any,
    position: int,
    written: _Nodes,
    names: Mapping[int, str],
    given: _Given,
) -> Child:
    number = _count(entry[0])
    own, is_node = divmod(number, 2) if number is not None else (None, 0)
    name = f"child {position}"
    if own is not None and is_node:
        name = written[own].name if own in written else _unnamed(own)
    elif own is not None:
        name = names.get(own, f"source {own}")
    fields = dict(zip(_WRITTEN, entry[1:], strict=False)) | dict(
        zip(_COUNTERS, listed(counted), strict=False)
    )
    fields |= given.get(number, {})
    return Child.model_validate({**fields, "is_node": bool(is_node), "id": own, "name": name})


def _unnamed(number: int) -> str:
    return "the root" if number == 0 else f"node {number}"


def _weighed(document: Mapping[str, Any], kind: str, factory: PipelineFactory) -> list[Any]:
    """The nodes of the state from which the factory's order would go on, with the weights that hold there."""
    timeline = Timeline(factory)
    if kind == SNAPSHOT:
        state = timeline.decode(canonical(document["resume_state"]))
    else:
        payload = foreign_payload.read(canonical(document))
        assert payload is not None, "it has datasets"
        state = resume_point(payload, timeline).base or factory.initial()
    factory = timeline.with_clock(state.clock_offset).at(state.sample_index)
    mixer = mixer_at(factory.config, state, factory.record.size_estimates)
    balances = [*map(factory.config.balanced, state.sources)]
    nodes = mixer.states(mixer.mix_weights, [0] * len(balances), balances)
    return [
        [[getattr(child, field) for field in _COUNTERS] for child in children] for children in nodes
    ]

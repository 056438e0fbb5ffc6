"""The snapshot: a state, sealed, self-sufficient, and plain enough for other tools to read.

A snapshot names a sample index and carries ``resume_state``, the state at the state boundary at or
before it; a restore goes forward from the one to the other and must meet the digest. Boundaries are
the same for all ranks, so every rank (and the server) writes the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from tokenloom_proto.seal import canonical, seal_texts, unseal

from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    MAX_COUNTER,
    ChildState,
    Cursor,
    Imported,
    Lane,
    RowCounts,
    SourceState,
    State,
    digest_hex,
)
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.mixing.weights import MAX_SUM

FORMAT = "tokenloom/snapshot"
VERSION = 1

#: A snapshot of 200 sources has at most 64 KB; larger mixtures are larger, but nothing honest is above this.
MAX_BYTES = 16 * 2**20

#: Of a dataset's entry, where a restore jumped over some of its samples.
_SKIPPED = ("skipped_samples", "skipped_rows", "skipped_tokens")

_Count = Field(ge=0, le=MAX_COUNTER)
_Digest = Field(pattern=r"^[0-9a-f]{32}$")


_Natural = Annotated[int, _Count]
_Flag = Annotated[int, Field(ge=0, le=1)]
#: Samples, tokens, credit, exhausted; and where the node's policy makes the weights itself: weight, total.
_Child = tuple[_Natural, _Natural, int, _Flag]
_WeighedChild = tuple[_Natural, _Natural, int, _Flag, Annotated[int, Field(ge=0, le=MAX_SUM)], _Natural]


_KINDS = ("plain", "weighed")


def _child_kind(child: object) -> str:
    return _KINDS[isinstance(child, list | tuple) and len(child) == 6]


_AnyChild = Annotated[
    Annotated[_Child, Tag("plain")] | Annotated[_WeighedChild, Tag("weighed")], Discriminator(_child_kind)
]


def _is_lane(entry: list[int]) -> list[int]:
    if len(entry) not in (6, 6 + len(RowCounts._fields)):
        raise ValueError(f"a lane has 6 numbers, or {6 + len(RowCounts._fields)} with what is tallied")
    return entry


#: Epoch, shard_index or window, row_offset or window_row, row_token_offset, samples, rows; and where it is not all 0,
#: what is tallied.
_Lane = Annotated[list[_Natural], AfterValidator(_is_lane)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class _Dataset(_Strict):
    """One source. ``row_offset`` counts within the shard, ``token_offset`` is the source's total."""

    id: int = _Count
    spec: str
    alias: str | None = None
    epoch: int = _Count
    row_token_offset: int = _Count
    #: With best-fit packing: how many samples are emitted of the rows that are packed together from here on.
    packed_samples: int = Field(default=0, ge=0, le=MAX_COUNTER)
    samples: int = _Count
    rows: int = _Count
    token_offset: int = _Count
    dropped_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    exhausted: bool = False
    skipped_samples: int = Field(default=0, ge=0, le=MAX_COUNTER)
    skipped_rows: int = Field(default=0, ge=0, le=MAX_COUNTER)
    skipped_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    bad_rows: int = Field(default=0, ge=0, le=MAX_COUNTER)
    filtered_rows: int = Field(default=0, ge=0, le=MAX_COUNTER)
    padding_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    cut_documents: int = Field(default=0, ge=0, le=MAX_COUNTER)
    lost_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    lanes: list[_Lane] = Field(default_factory=list)

    @property
    def offset(self) -> int:
        return self.row_token_offset or self.packed_samples


class _InFiles(_Dataset):
    """One that is read file by file."""

    shuffle: Literal["none", "shards"] = "none"
    shard: str
    shard_index: int = _Count
    row_offset: int = _Count

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.shard_index, self.row_offset, self.offset)


class _InWindows(_Dataset):
    """One of shuffled rows: where it stands is no place of a file."""

    shuffle: Literal["rows"]
    window: int = _Count
    window_row: int = _Count

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.window, self.window_row, self.offset)


_Known = _InFiles | _InWindows


class _Imported(_Strict):
    sample_index: int = _Count
    digest: str = _Digest


class _Preserved(_Strict):
    """A source of an older data loader's checkpoint that no mixture of the run has, as that loader wrote it."""

    model_config = ConfigDict(extra="allow")

    spec: str
    unknown: Literal[True]


_DATASETS = ("read in files", "of shuffled rows", "preserved")


def _dataset_kind(entry: object) -> str:
    if not isinstance(entry, dict):
        return _DATASETS[0]
    return _DATASETS[2 if "unknown" in entry else entry.get("shuffle") == "rows"]


_AnyDataset = Annotated[
    Annotated[_InFiles, Tag(_DATASETS[0])]
    | Annotated[_InWindows, Tag(_DATASETS[1])]
    | Annotated[_Preserved, Tag(_DATASETS[2])],
    Discriminator(_dataset_kind),
]


class _Node(_Strict):
    """A node of the mixture; of each child 2 × source id (or 2 × node id + 1), its weight, "paused" or "dropped"."""

    id: int = _Count
    policy: str
    alias: str | None = None
    interpolate: str | None = None
    children: list[list[Any]]


class _Revision(_Strict):
    sample_index: int = _Count
    content: dict[str, Any]


class _ResumeState(_Strict):
    sample_index: int = _Count
    digest: str = _Digest
    total_tokens: int = _Count
    datasets: list[_AnyDataset]
    imported: _Imported | None = None
    #: By node, as in ``mixture``, by child.
    nodes: list[list[_AnyChild]]
    #: The mixture in force, by node id, for readers without the mixture file; states of before do not have it.
    mixture: list[_Node] | None = None
    #: The revision in force, and all that are to come.
    revisions: list[_Revision] | None = None
    #: Where the run was forked from.
    origin: dict[str, Any] | None = None


class _Snapshot(_Strict):
    format: str
    version: int
    run: str
    stream: str
    sample_index: int = _Count
    digest: str = _Digest
    total_tokens: int = _Count
    run_uid: str | None = Field(default=None, min_length=1, max_length=256)
    generation: int | None = Field(default=None, ge=0, le=MAX_COUNTER)
    seed: int | None = None
    order_version: int | None = None
    config_digest: str | None = None
    manifest_digest: str | None = None
    tokenizer: dict[str, str] | None = None
    resume_state: _ResumeState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run's states look like: a state that does not fit is refused before anything uses it."""

    specs: tuple[str, ...]
    """By source id."""
    shards: tuple[tuple[str, ...], ...]
    """Each source's shard paths."""
    nodes: Mapping[int, tuple[int, ...]]
    """By node id, ascending, the children's stable ids: 2 × source id, or 2 × node id + 1."""
    sample_tokens: int
    """Of a sample that begins here."""
    names: tuple[str | None, ...]
    """The sources' aliases."""
    shuffles: tuple[str, ...]
    """The sources' ``shuffle``."""
    lanes: tuple[int, ...]
    """How many lanes the sources have."""
    mixture: tuple[Mapping[str, Any], ...]
    """The nodes as ``resume_state`` describes them."""
    revision: tuple[int, str] | None = None
    """The newest revision that holds: its sample index and ``what_of`` its content."""
    best_fit: bool = False
    """Whether a cursor's offset counts the samples that a window of rows has given, and not tokens of a row."""
    left_samples: int = 0
    """Samples before a fork whose sources the run does not have."""
    total_tokens: Callable[[int], int] | None = None
    """The run's total tokens at a sample index, where samples were not always of one length."""

    def tokens_at(self, sample_index: int) -> int:
        """The run's total tokens at a sample index."""
        return self.total_tokens(sample_index) if self.total_tokens is not None else sample_index * self.sample_tokens


#: The shape that the states of a run have at a sample index.
ShapeAt = Callable[[int], Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A sample index to resume at, with the state to go forward from (None: from the beginning)."""

    sample_index: int
    digest: str | None
    """None where only the order itself can tell it: an older checkpoint may say no more than how many samples."""
    total_tokens: int
    base: State | None
    #: The run and generation it was taken in; None and 0 for a state from before the first join.
    run_uid: str | None = None
    generation: int = 0
    #: Of an older data loader's checkpoint, what was made of it, a line for each spec; empty for a snapshot.
    notes: tuple[str, ...] = ()


def encode_state(
    state: State,
    shape: Shape,
    revisions: Sequence[Mapping[str, Any]] = (),
    origin: Mapping[str, Any] | None = None,
) -> str:
    """``resume_state``: the canonical JSON of a state. ``revisions``: what changed the mixture file's own rules;
    ``origin``: where the run was forked from."""
    datasets = []
    for i, (source, spec) in enumerate(zip(state.sources, shape.specs, strict=True)):
        entry: dict[str, Any] = {
            "id": i,
            "spec": spec,
            **_place(source.cursor, shape, i),
            "epoch": source.cursor.epoch,
            "row_token_offset": source.cursor.offset,
            "samples": source.samples,
            "rows": source.rows,
            "token_offset": source.tokens,
        }
        if shape.best_fit and source.cursor.offset:
            entry |= {"row_token_offset": 0, "packed_samples": source.cursor.offset}
        if source.exhausted:
            entry |= {"exhausted": True, "dropped_tokens": source.dropped_tokens}
        if source.lanes:
            entry["lanes"] = [_encode_lane(lane) for lane in source.lanes]
        if source.skipped_samples:
            entry |= {name: getattr(source, name) for name in _SKIPPED}
        entry |= {name: count for name, count in source.tally._asdict().items() if count}
        if shape.names[i] is not None:
            entry["alias"] = shape.names[i]
        datasets.append(entry)
    datasets += [{**json.loads(entry), "unknown": True} for entry in state.preserved]
    fields = {
        "sample_index": state.sample_index,
        "digest": digest_hex(state.digest),
        "total_tokens": state.total_tokens,
        "datasets": datasets,
        "nodes": [_encode_node(children) for children in state.nodes],
        "mixture": shape.mixture,
    }
    if state.imported is not None:
        fields["imported"] = {
            "sample_index": state.imported.sample_index,
            "digest": digest_hex(state.imported.digest),
        }
    if revisions:
        fields["revisions"] = list(revisions)
    if origin is not None:
        fields["origin"] = origin
    return canonical(fields)


def _place(cursor: Cursor, shape: Shape, source: int) -> dict[str, Any]:
    """Where a cursor stands within its epoch, by names that say what it is."""
    shuffle = shape.shuffles[source]
    named = {} if shuffle == "none" else {"shuffle": shuffle}
    if shuffle == "rows":
        return {**named, "window": cursor.shard, "window_row": cursor.row}
    return {
        **named,
        "shard": shape.shards[source][cursor.shard],
        "shard_index": cursor.shard,
        "row_offset": cursor.row,
    }


def _encode_lane(lane: Lane) -> list[int]:
    cursor = lane.cursor
    tally = lane.tally if any(lane.tally) else ()
    return [cursor.epoch, cursor.shard, cursor.row, cursor.offset, lane.samples, lane.rows, *tally]


def _encode_node(children: tuple[ChildState, ...]) -> list[list[int]]:
    rows = [[child.samples, child.tokens, child.credit, int(child.exhausted)] for child in children]
    if any(child.weight or child.total for child in children):
        rows = [[*row, child.weight, child.total] for row, child in zip(rows, children, strict=True)]
    return rows


def decode_state(resume_state: str, shape_at: ShapeAt) -> State:
    """Reads ``encode_state`` back. Raises ``SnapshotInvalid`` naming the field that does not fit the run."""
    try:
        return _state(_ResumeState.model_validate_json(resume_state), shape_at)
    except ValidationError as error:
        raise SnapshotInvalid(_explain(error)) from None


def compose(template: Mapping[str, Any], resume_state: str, index: int, digest: str, tokens: int) -> str:
    """The sealed snapshot at a sample index; ``resume_state`` as ``encode_state`` wrote it. The client does the same
    with what the wire carries."""
    position = {"sample_index": index, "digest": digest, "total_tokens": tokens}
    texts = {key: canonical(value) for key, value in {**template, **position}.items()}
    return seal_texts(texts | {"resume_state": resume_state})


def _read(text: str | bytes) -> _Snapshot:
    if len(text) > MAX_BYTES:
        raise SnapshotInvalid(f"the snapshot has {len(text)} bytes; expected at most {MAX_BYTES}")
    try:
        document = unseal(text)
    except ValueError as error:
        raise SnapshotInvalid(str(error)) from None
    found = {key: document.get(key) for key in ("format", "version")}
    if found["format"] != FORMAT:
        raise SnapshotInvalid(f"format is {found['format']!r}, expected {FORMAT!r}")
    if found["version"] != VERSION:
        raise SnapshotInvalid(
            f"the snapshot has format version {found['version']!r}, this server reads {VERSION}: "
            "restore it with the Tokenloom release that wrote it"
        )
    try:
        # As JSON, where a list is a tuple, and nothing else is converted.
        return _Snapshot.model_validate_json(canonical(document))
    except ValidationError as error:
        raise SnapshotInvalid(_explain(error)) from None


def parse(text: str | bytes, template: Mapping[str, Any], shape_at: ShapeAt) -> ResumePoint:
    """Reads and checks a snapshot against the run that it is to resume.

    ``template`` holds what the run's own snapshots say (without run_uid and generation, which are the
    caller's to compare). Raises ``SnapshotInvalid``, naming the field, both values and the remedy.
    """
    snapshot = _read(text)
    for field, remedy in _REMEDIES.items():
        theirs, ours = getattr(snapshot, field), template.get(field)
        if theirs is not None and theirs != ours:
            raise SnapshotInvalid(f"the snapshot's {field} is {theirs!r}, this run's is {ours!r}: {remedy}")
    if snapshot.resume_state is None:
        if snapshot.sample_index or int(snapshot.digest, 16) or snapshot.total_tokens:
            raise SnapshotInvalid(f"resume_state is missing, and sample_index is {snapshot.sample_index}, not 0")
        base = None
    else:
        needed = (*_REMEDIES, "run_uid", "generation")
        missing = [field for field in needed if getattr(snapshot, field) is None]
        if missing:
            raise SnapshotInvalid(f"{', '.join(missing)} missing: they must be there beside resume_state")
        base = _state(snapshot.resume_state, shape_at)
        if base.sample_index > snapshot.sample_index:
            raise SnapshotInvalid(
                f"resume_state is at sample {base.sample_index}, behind sample_index {snapshot.sample_index}"
            )
        _check_position(
            "", snapshot.sample_index, snapshot.total_tokens, snapshot.digest, shape_at(snapshot.sample_index)
        )
    return ResumePoint(
        sample_index=snapshot.sample_index,
        digest=snapshot.digest,
        total_tokens=snapshot.total_tokens,
        base=base,
        run_uid=snapshot.run_uid,
        generation=snapshot.generation or 0,
    )


_REMEDIES = {
    "run": "load it into that run",
    "stream": "load it into that stream",
    "order_version": "serve it with the Tokenloom release that wrote it",
    "seed": "restore the seed in the mixture file, or start a new run under another name",
    "tokenizer": "restore that tokeniser and engine version, or start a new run under another name",
    "config_digest": "restore the mixture file that the run began with, or start a new run under another name",
    "manifest_digest": "restore the data files that the run began with, or start a new run under another name",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source as a snapshot of whichever run has it: by spec, and its shard by path."""

    spec: str
    shard: str | None
    """None where it stands in no file: of shuffled rows."""
    state: SourceState
    shuffle: str = "none"
    in_window: bool = False
    """Whether the cursor stands in a window of best-fit packing."""


class Foreign(_Snapshot):
    """A snapshot as it is, of whichever run that has begun."""

    resume_state: _ResumeState

    @property
    def revisions(self) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """(sample index, content) of the revisions that it carries."""
        return [(revision.sample_index, revision.content) for revision in self.resume_state.revisions or ()]

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """Where its run was forked from."""
        return self.resume_state.origin

    def sources(self) -> tuple[Source, ...]:
        """Where they stand at the sample index of ``resume_state``, which may lie before that of the snapshot."""
        return tuple(
            Source(
                spec=dataset.spec,
                shard=dataset.shard if isinstance(dataset, _InFiles) else None,
                state=_source(dataset),
                shuffle=dataset.shuffle,
                in_window=dataset.packed_samples > 0,
            )
            for dataset in self.resume_state.datasets
            if isinstance(dataset, _Known)
        )


def foreign(text: str | bytes) -> Foreign | None:
    """What a snapshot says, whichever run it is of; None where that has not begun. Raises ``SnapshotInvalid``."""
    document = _read(text)
    return Foreign.model_construct(**dict(document)) if document.resume_state is not None else None


def _state(resume: _ResumeState, shape_at: ShapeAt) -> State:
    shape = shape_at(resume.sample_index)
    _check_mixture(resume, shape)
    _check_position("resume_state.", resume.sample_index, resume.total_tokens, resume.digest, shape)
    datasets = [entry for entry in resume.datasets if isinstance(entry, _Known)]
    began = resume.imported
    if began is not None and began.sample_index > resume.sample_index:
        raise SnapshotInvalid(
            f"resume_state.imported.sample_index is {began.sample_index}, beyond sample_index {resume.sample_index}"
        )
    preserved = [entry for entry in resume.datasets if isinstance(entry, _Preserved)]
    sources = _sources(datasets, shape)
    nodes = tuple(
        tuple(ChildState(samples, tokens, credit, bool(out), *made) for samples, tokens, credit, out, *made in children)
        for children in resume.nodes
    )
    _check_nodes(nodes, sources, resume.sample_index, shape)
    return State(
        sample_index=resume.sample_index,
        total_tokens=resume.total_tokens,
        digest=int(resume.digest, 16),
        sources=sources,
        nodes=nodes,
        preserved=tuple(canonical(entry.model_dump(exclude={"unknown"})) for entry in preserved),
        imported=Imported(began.sample_index, int(began.digest, 16)) if began is not None else None,
    )


def _check_mixture(resume: _ResumeState, shape: Shape) -> None:
    """Whether the state was made under the mixture that is in force there."""
    if resume.mixture is None or not shape.mixture:
        return
    theirs = [node.model_dump(exclude_none=True) for node in resume.mixture]
    for found, expected in zip_longest(theirs, shape.mixture):
        if found != expected:
            raise SnapshotInvalid(
                f"resume_state.mixture at sample {resume.sample_index} has {_short(found)}, but in force there is "
                f"{_short(expected)}: a revision was dropped or made elsewhere; use that run's ledger, or an empty "
                "one with the same mixture file, or fork a new run from this state"
            )
    # Limits, files and rows that are left out are not among what describes a node.
    held = [revision for revision in resume.revisions or () if revision.sample_index <= resume.sample_index]
    made_under = (held[-1].sample_index, what_of(held[-1].content)) if held else None
    if made_under != shape.revision:
        raise SnapshotInvalid(
            f"resume_state.revisions at sample {resume.sample_index} has {_of_revision(made_under)}, but in force "
            f"there is {_of_revision(shape.revision)}: it was dropped, or made on another line of the run; use that "
            "run's ledger, or resume from a state of the present line"
        )


def what_of(content: Mapping[str, Any]) -> str:
    """What a revision makes of the run, as canonical JSON: not during which generation it was made."""
    return canonical({key: value for key, value in content.items() if key != "generation"})


def _of_revision(revision: tuple[int, str] | None) -> str:
    return f"the revision from sample {revision[0]} on" if revision is not None else "none"


def _short(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 200 else text[:199] + "…"


def _check_position(where: str, sample_index: int, total_tokens: int, digest: str, shape: Shape) -> None:
    if int(digest, 16) >= DIGEST_MODULUS:
        raise SnapshotInvalid(f"{where}digest {digest!r} is not below 2^127 − 1")
    expected = shape.tokens_at(sample_index)
    if total_tokens != expected:
        of = "" if shape.total_tokens is not None else f" of {shape.sample_tokens} tokens"
        raise SnapshotInvalid(f"{where}total_tokens is {total_tokens}, but {sample_index} samples{of} have {expected}")


def _sources(datasets: Sequence[_Known], shape: Shape) -> tuple[SourceState, ...]:
    if [dataset.spec for dataset in datasets] != list(shape.specs):
        theirs, ours = {dataset.spec for dataset in datasets}, set(shape.specs)
        raise SnapshotInvalid(
            "resume_state.datasets does not list this run's sources in their order; "
            f"only there: {sorted(theirs - ours) or 'none'}, only here: {sorted(ours - theirs) or 'none'}"
        )
    sources = []
    for i, dataset in enumerate(datasets):
        shards, shuffle = shape.shards[i], shape.shuffles[i]
        if dataset.shuffle != shuffle:
            raise SnapshotInvalid(
                f"resume_state.datasets.{i}: shuffle is {dataset.shuffle!r}, but {dataset.spec!r} of this run has "
                f"{shuffle!r}"
            )
        if dataset.id != i or (
            isinstance(dataset, _InFiles) and dataset.shard not in shards[dataset.shard_index :][:1]
        ):
            found = f"shard {dataset.shard!r} at {dataset.shard_index}" if isinstance(dataset, _InFiles) else "its id"
            raise SnapshotInvalid(
                f"resume_state.datasets.{i}: {found} is not in this run's manifest of {dataset.spec!r}"
            )
        if shape.total_tokens is None and dataset.token_offset != dataset.samples * shape.sample_tokens:
            raise SnapshotInvalid(
                f"resume_state.datasets.{i}: token_offset is {dataset.token_offset}, but {dataset.samples} samples of "
                f"{shape.sample_tokens} tokens have {dataset.samples * shape.sample_tokens}"
            )
        for field, given in (("row_token_offset", not shape.best_fit), ("packed_samples", shape.best_fit)):
            if getattr(dataset, field) and not given:
                raise SnapshotInvalid(
                    f"resume_state.datasets.{i}: {field} is {getattr(dataset, field)}, but this run's packing has no "
                    "such place: restore the mixture file that the state was made under, or fork a new run from it"
                )
        _check_skipped(i, dataset)
        _check_lanes(i, dataset, shape)
        sources.append(_source(dataset))
    return tuple(sources)


def _source(dataset: _Known) -> SourceState:
    return SourceState(
        cursor=dataset.cursor,
        samples=dataset.samples,
        rows=dataset.rows,
        tokens=dataset.token_offset,
        dropped_tokens=dataset.dropped_tokens,
        exhausted=dataset.exhausted,
        skipped_samples=dataset.skipped_samples,
        skipped_rows=dataset.skipped_rows,
        skipped_tokens=dataset.skipped_tokens,
        tally=RowCounts(*(getattr(dataset, name) for name in RowCounts._fields)),
        lanes=tuple(_lane(entry) for entry in dataset.lanes),
    )


def _check_lanes(i: int, dataset: _Known, shape: Shape) -> None:
    """A source of several lanes has all of them, and gave what they gave; before its first sample it has none."""
    where, several = f"resume_state.datasets.{i}: ", shape.lanes[i]
    expected = several if several > 1 and dataset.samples else 0
    if len(dataset.lanes) != expected:
        raise SnapshotInvalid(f"{where}lanes has {len(dataset.lanes)} entries, but this run's source has {expected}")
    lanes = [_lane(entry) for entry in dataset.lanes]
    for field in ("samples", "rows") if lanes else ():
        given = sum(getattr(lane, field) for lane in lanes)
        if given != getattr(dataset, field):
            raise SnapshotInvalid(f"{where}{field} is {getattr(dataset, field)}, but its lanes have {given}")
    if lanes and dataset.cursor not in [lane.cursor for lane in lanes]:
        raise SnapshotInvalid(f"{where}none of its lanes stands where the source does, at {dataset.cursor}")
    for number, lane in enumerate(lanes):
        if isinstance(dataset, _InFiles) and lane.cursor.shard >= len(shape.shards[i]):
            raise SnapshotInvalid(
                f"{where}lanes.{number} stands in shard {lane.cursor.shard}, but there are {len(shape.shards[i])}"
            )


def _lane(entry: Sequence[int]) -> Lane:
    return Lane(Cursor(*entry[:4]), entry[4], entry[5], RowCounts(*entry[6:]))


def _check_skipped(i: int, dataset: _Dataset) -> None:
    """What was jumped over is a part of all that the source gave; without samples it is nothing."""
    for skipped, name in zip(_SKIPPED, ("samples", "rows", "token_offset"), strict=True):
        part, whole = getattr(dataset, skipped), getattr(dataset, name)
        if part > whole or (part and not dataset.skipped_samples):
            raise SnapshotInvalid(
                f"resume_state.datasets.{i}: {skipped} is {part}, but it is a part of {name}, which is {whole}, and "
                f"skipped_samples is {dataset.skipped_samples}"
            )


def _check_nodes(
    nodes: tuple[tuple[ChildState, ...], ...], sources: tuple[SourceState, ...], sample_index: int, shape: Shape
) -> None:
    """The tree has the run's shape, and what a node counts of a child is what the child says itself."""
    found, expected = [len(children) for children in nodes], [len(ids) for ids in shape.nodes.values()]
    if found != expected:
        raise SnapshotInvalid(
            f"resume_state.nodes: the nodes have {found} children, but this run's mixture has {expected}"
        )
    by_number = dict(zip(shape.nodes, nodes, strict=True))
    issued = {number: sum(child.samples for child in children) for number, children in by_number.items()}
    tokens = {number: sum(child.tokens for child in children) for number, children in by_number.items()}
    if issued[0] + shape.left_samples != sample_index:
        raise SnapshotInvalid(
            f"resume_state.nodes.0: its children have {issued[0]} samples, but sample_index is {sample_index}"
        )
    for children, (number, ids) in zip(nodes, shape.nodes.items(), strict=True):
        for i, (child, child_id) in enumerate(zip(children, ids, strict=True)):
            own, is_node = divmod(child_id, 2)
            samples = issued[own] if is_node else sources[own].samples
            given = samples * shape.sample_tokens
            if shape.total_tokens is not None:
                given = tokens[own] if is_node else sources[own].tokens
            exhausted = child.exhausted if is_node else sources[own].exhausted
            if (child.samples, child.tokens, child.exhausted) != (samples, given, exhausted):
                raise SnapshotInvalid(
                    f"resume_state.nodes.{number}.{i}: {child} is not what {'node' if is_node else 'source'} {own} "
                    f"says itself: {samples} samples, exhausted {exhausted}"
                )
            if abs(child.credit) > MAX_COUNTER:
                raise SnapshotInvalid(
                    f"resume_state.nodes.{number}.{i}: credits are within ±2^53, found {child.credit}"
                )


def _explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    # The tags of unions are pydantic's own; the document has no such level.
    parts = (str(part) for part in fault["loc"] if part not in (*_KINDS, *_DATASETS))
    field = re.sub(r"\.(?=\.)", "", ".".join(parts))
    return f"{field or 'the snapshot'}: {fault['msg']}; found {str(fault['input'])[:80]!r}"

"""A checkpoint of an older data loader as the beginning of a run: its cursors, counters and balances go on here.

Older payloads are plain JSON: ``{"resume_state": {"datasets": [{"spec", "shard", "row_offset", "token_offset"}]}}``, or
only ``{"sample_index": N}``. Neither has a place in this run's order: the first becomes a state that begins a lineage
of its own, the second is a count of samples to skip from the order's beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenloom_proto.seal import CHECKSUM, canonical

from tokenloom_server.config.catalog import SourceSchemes
from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    MAX_COUNTER,
    FileCursor,
    Imported,
    SourceState,
    State,
    digest_hex,
)
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.mixing import elsewhere
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.snapshot_document import MAX_BYTES
from tokenloom_server.order.state_shape import Shape
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.scheme import scheme_of

#: Rows of earlier shards are counted as far as that costs no scan of more text than this, bytes.
_COUNTED_BYTES = 2**30
#: Every state carries what is preserved, and travels to every rank; bytes.
_PRESERVED_BYTES = 2**17

_Count = Annotated[int, Field(ge=0, le=MAX_COUNTER)]


class _Entry(BaseModel):
    """One source of an older payload, with whatever else that tool wrote of it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    spec: Annotated[str, Field(min_length=1)]
    shard: Annotated[str, Field(min_length=1)]
    row_offset: _Count
    token_offset: _Count | None = None
    epoch: _Count = 0


class _ResumeState(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    datasets: Annotated[list[_Entry], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Payload:
    """What an older checkpoint says: ``datasets`` as they were written, or only a ``sample_index``."""

    datasets: tuple[_Entry, ...]
    sample_index: int


def read(text: str | bytes) -> Payload | None:
    """The payload of an older tool; None where this is not one, but (for all that this function knows) a snapshot.

    Raises ``SnapshotInvalid`` naming spec and field.
    """
    if len(text) > MAX_BYTES:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "format" in document or CHECKSUM in document:
        return None
    resume = document.get("resume_state")
    if resume is None and "sample_index" not in document:
        return None
    if resume is not None and not isinstance(resume, dict):
        raise SnapshotInvalid(f"resume_state: expected a mapping with datasets, found {type(resume).__name__}")
    if resume is not None and "datasets" in resume:
        try:
            return Payload(tuple(_ResumeState.model_validate(resume).datasets), 0)
        except ValidationError as error:
            raise SnapshotInvalid(_explain(error, resume)) from None
    sample_index = document.get("sample_index", (resume or {}).get("sample_index"))
    if type(sample_index) is not int or not 0 <= sample_index <= MAX_COUNTER:
        raise SnapshotInvalid(
            f"sample_index: found {_short(sample_index)}; an older checkpoint has resume_state.datasets, or a "
            "sample_index that is an integer from 0 to 2^53 − 1"
        )
    return Payload((), sample_index)


def resume_point(payload: Payload, timeline: Timeline) -> ResumePoint:
    """Where a run goes on from an older checkpoint.

    Raises ``SnapshotInvalid`` naming spec, field, what was found and what was expected.
    """
    if not payload.datasets:
        note = (
            f"resume: sample_index={payload.sample_index} (from an older checkpoint that has nothing else: so many "
            "samples are skipped from the beginning of the order)"
        )
        return ResumePoint(
            sample_index=payload.sample_index,
            digest=None,
            total_tokens=timeline.tokens_at(payload.sample_index),
            base=None,
            notes=(note,),
        )
    if timeline.first.config.batching is not None:
        raise SnapshotInvalid(
            "resume_state.datasets: an older data loader's checkpoint names rows of files, but this run's order is "
            "made of batches from buckets, which it knows nothing of: begin the run anew, or give sample_index alone"
        )
    by_spec = _by_spec(payload.datasets, timeline.first.config.catalog.sources)
    state, notes = _state(by_spec, _in_force(by_spec, timeline))
    return ResumePoint(
        sample_index=state.sample_index,
        digest=digest_hex(state.digest),
        total_tokens=state.total_tokens,
        base=state,
        notes=notes,
    )


def _by_spec(entries: Sequence[_Entry], schemes: SourceSchemes) -> dict[str, tuple[int, _Entry]]:
    """The entries with their positions, by their specs as this run has them. Raises ``SnapshotInvalid`` for one that
    comes twice."""
    by_spec: dict[str, tuple[int, _Entry]] = {}
    for i, entry in enumerate(entries):
        first, _ = by_spec.setdefault(_normalised(entry.spec, schemes), (i, entry))
        if first != i:
            raise SnapshotInvalid(
                f"resume_state.datasets.{i} (spec {entry.spec!r}): spec stands there already, at {first}; expected "
                "each once"
            )
    return by_spec


def _in_force(by_spec: Mapping[str, tuple[int, _Entry]], timeline: Timeline) -> PipelineFactory:
    """What is in force at the sample index that the sources' tokens give, by the run's phases and revisions."""
    for segment, after in zip(timeline.segments, [*timeline.segments[1:], None], strict=True):
        specs, length = segment.factory.record.specs, segment.config.sequence_length
        samples = sum((entry.token_offset or 0) // length for spec, (_, entry) in by_spec.items() if spec in specs)
        reached = segment.begin <= samples and (after is None or samples < after.begin)
        if reached and timeline.tokens_at(samples) == samples * length:
            return segment.factory
    raise SnapshotInvalid(
        "resume_state.datasets: token_offset adds up to a place after which the mixture file's phases change the "
        "sequence length, but an older checkpoint's samples count as of one length: give the mixture file the "
        "sequence length of that place alone"
    )


def _state(by_spec: Mapping[str, tuple[int, _Entry]], factory: PipelineFactory) -> tuple[State, tuple[str, ...]]:
    """The state, and what was made of each entry, a line each."""
    length, specs = factory.config.sequence_length, factory.record.specs
    known = [spec in by_spec for spec in specs]
    if not any(known):
        raise SnapshotInvalid(
            "resume_state.datasets: none of its specs is in this mixture; found "
            f"{_names(entry.spec for _, entry in by_spec.values())}, expected some of {_names(specs)}"
        )
    pairs = [_source(i, *by_spec[spec], factory) if spec in by_spec else None for i, spec in enumerate(specs)]
    sources = [pair[0] if pair is not None else SourceState() for pair in pairs]
    total = sum(source.samples for source in sources)
    if total * length > MAX_COUNTER:
        raise SnapshotInvalid(
            f"resume_state.datasets: token_offset adds up to {total * length}; counters end at 2^53 − 1"
        )
    nodes = elsewhere.imported(factory.config, sources, known)
    notes = [
        pair[1] if pair is not None else _new(spec, factory, baseline)
        for spec, pair, baseline in zip(specs, pairs, nodes.baselines, strict=True)
    ]
    unknown = [entry for spec, (_, entry) in by_spec.items() if spec not in specs]
    notes += [f"resume: spec={entry.spec} preserved: not in this mixture" for entry in unknown]
    digest = _digest(sources, factory.record.shape)
    state = State(
        sample_index=total,
        total_tokens=total * length,
        digest=digest,
        sources=tuple(sources),
        nodes=nodes.nodes,
        preserved=_preserved(unknown),
        imported=Imported(total, digest),
    )
    return state, tuple(notes)


def _source(source: int, position: int, entry: _Entry, factory: PipelineFactory) -> tuple[SourceState, str]:
    """Where an entry's source goes on, and a line about it."""
    length = factory.config.sequence_length
    cursor = _cursor(f"resume_state.datasets.{position} (spec {entry.spec!r})", entry, source, factory)
    rows, counted = _rows_before(source, cursor, factory)
    samples = (entry.token_offset or 0) // length
    note = (
        f"resume: spec={factory.record.specs[source]} shard={factory.record.shard_paths[source][cursor.shard]} "
        f"row_offset={cursor.row} tokens={samples * length} (from an older checkpoint"
        + ("" if entry.token_offset is not None else "; it has no token_offset, which counts as 0")
        + ("" if counted else "; rows are counted from this shard on")
        + ")"
    )
    return SourceState(cursor=cursor, samples=samples, rows=rows, tokens=samples * length), note


def _preserved(entries: Sequence[_Entry]) -> tuple[str, ...]:
    """What unknown sources had, as text that every later state carries."""
    try:
        texts = tuple(canonical(entry.model_dump(exclude_unset=True, exclude={"unknown"})) for entry in entries)
        size = sum(len(text.encode()) for text in texts)
    except (ValueError, RecursionError) as error:
        raise SnapshotInvalid(
            f"resume_state.datasets: what it has of {_names(entry.spec for entry in entries)}, which this mixture "
            f"lacks, is no JSON that can be written back ({type(error).__name__}): leave these out"
        ) from None
    if size > _PRESERVED_BYTES:
        raise SnapshotInvalid(
            f"resume_state.datasets: what it has of specs that this mixture lacks is {size} bytes; expected at most "
            f"{_PRESERVED_BYTES}, since every snapshot carries it: leave some out"
        )
    return texts


def _new(spec: str, factory: PipelineFactory, baseline: int | None) -> str:
    if baseline is None:
        return f"resume: spec={spec} new: starts at its beginning; the policies above it keep no balance"
    which = {"min": "the minimum", "mean": "the mean", "zero": "zero"}[factory.config.new_source_baseline]
    return f"resume: spec={spec} new: starts at {which}, {baseline} tokens"


def _digest(sources: Sequence[SourceState], shape: Shape) -> int:
    """A hash of the place itself, since no sample before it is known: runs that go on from the same place have equal
    digests, and ranks that bring different places have different ones."""
    places = [
        [spec, cursor.epoch, shards[cursor.shard], cursor.row, cursor.tokens, source.samples]
        for spec, shards, source in zip(shape.specs, shape.shards, sources, strict=True)
        for cursor in [source.cursor if isinstance(source.cursor, FileCursor) else FileCursor(0, 0, 0)]
    ]
    text = canonical({"imported": places, "sample_tokens": shape.sample_tokens})
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % DIGEST_MODULUS


def _cursor(where: str, entry: _Entry, source: int, factory: PipelineFactory) -> FileCursor:
    config = factory.config.sources[source]
    if not config.in_file_order:
        raise SnapshotInvalid(
            f"{where}: shard and row_offset are a place in file order, but the mixture file reads the source with "
            f"shuffle: {config.shuffle} in {config.lanes} lanes, where other rows lie before it: leave both out to go "
            "on from there, or take the entry out of the checkpoint's copy to read the source from its beginning"
        )
    shard = _shard(where, entry.shard, factory.record.shard_paths[source], factory)
    path, rows = factory.record.shard_paths[source][shard], factory.readers.open(source).row_count(shard)
    if entry.row_offset > rows:
        raise SnapshotInvalid(f"{where}: row_offset is {entry.row_offset}, but {path} has {rows} rows")
    epochs = factory.config.epochs[source]
    if entry.epoch >= epochs:
        raise SnapshotInvalid(
            f"{where}: epoch is {entry.epoch}, but the mixture file reads the source for {epochs:g} epochs, counted "
            "from 0: raise its epochs"
        )
    return FileCursor(entry.epoch, shard, entry.row_offset)


def _shard(where: str, path: str, paths: Sequence[str], factory: PipelineFactory) -> int:
    """The position of a shard: its path as it stands, or the one path that is the same but for where it begins."""
    if path in paths:
        return paths.index(path)
    base_dir = factory.resources.base_dir
    same = [i for i, known in enumerate(paths) if normpath(base_dir / known) == normpath(base_dir / path)]
    if not same:
        same = [i for i, known in enumerate(paths) if _ends_alike(PurePath(path), PurePath(known))]
    if len(same) == 1:
        return same[0]
    if same:
        raise SnapshotInvalid(
            f"{where}: shard {path!r} may be each of {_names(paths[i] for i in same)}; write the path as the mixture "
            "file's source has it"
        )
    raise SnapshotInvalid(
        f"{where}: shard {path!r} is none of the source's files; expected one of {_names(paths)}. Where files were "
        "moved, write their new paths into the checkpoint's copy"
    )


def _ends_alike(a: PurePath, b: PurePath) -> bool:
    """Whether one path is the end of the other: relative to another folder."""
    shorter = min(len(a.parts), len(b.parts))
    return a.parts[-shorter:] == b.parts[-shorter:]


def _rows_before(source: int, cursor: FileCursor, factory: PipelineFactory) -> tuple[int, bool]:
    """Rows before a cursor since the source's beginning, and whether those of earlier shards are among them: text has
    to be read for that."""
    shards = factory.record.shards[source]
    passed = range(len(shards)) if cursor.epoch else range(cursor.shard)
    scanned = not scheme_of(factory.config.sources[source].spec).reader(shards).stores_row_counts
    if scanned and sum(shards[i].size for i in passed) > _COUNTED_BYTES:
        return cursor.row, False
    reader = factory.readers.open(source)
    counts = [reader.row_count(i) for i in passed]
    return cursor.epoch * sum(counts) + sum(counts[: cursor.shard]) + cursor.row, True


def _normalised(spec: str, schemes: SourceSchemes) -> str:
    try:
        return str(schemes.spec(spec))
    except ConfigError:
        return spec  # of a kind that this release does not read: no source of any mixture has it


def _explain(error: ValidationError, resume: dict[str, Any]) -> str:
    fault = error.errors()[0]
    where = ".".join(map(str, ("resume_state", *fault["loc"][:2])))
    if len(fault["loc"]) > 1:
        entry = resume["datasets"][fault["loc"][1]]
        if isinstance(entry, dict):
            where += f" (spec {_short(entry.get('spec'))})"
    fields = ".".join(map(str, fault["loc"][2:]))
    value = "nothing" if fault["type"] == "missing" else _short(fault["input"])
    return f"{where}: {fields + ': ' if fields else ''}found {value}; {fault['msg']}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _names(values: Iterator[str] | Sequence[str]) -> str:
    names = [repr(value) for value in values]
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")

"""A checkpoint of an older data loader as the beginning of a run: its cursors, counters and balances go on here.

Older payloads are plain JSON: ``{"resume_state": {"datasets": [{"spec", "shard", "row_offset", "token_offset"}]}}``, or
only ``{"sample_index": N}``. Neither has a place in this run's order: the first becomes a state that begins a lineage
of its own, the second is a count of samples to skip from the order's beginning. Their token clock goes on in both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

#: The names that older tools have for the tokens of a sample.
_SAMPLE_TOKENS = ("context_length", "sequence_length", "block_size", "max_seq_len")
_OTHER_LENGTHS = (
    "before which the mixture file's phases change the sequence length (or the run was forked), but an older "
    "checkpoint's samples count as of one length: give the mixture file the sequence length of that place alone"
)

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
    """What an older checkpoint says: ``datasets`` as they were written, or only a ``sample_index``; and what its token
    clock can be read from, None where it does not say."""

    datasets: tuple[_Entry, ...]
    sample_index: int | None
    total_tokens: int | None
    sample_tokens: int | None

    def clock(self) -> tuple[int | None, str]:
        """The total tokens of the job that wrote it (None where they cannot be known), and where that is from."""
        offsets = [entry.token_offset for entry in self.datasets if entry.token_offset is not None]
        if self.total_tokens is not None:
            return self.total_tokens, "the older checkpoint's own"
        if offsets and len(offsets) == len(self.datasets):
            return sum(offsets), "the sum of the older checkpoint's token_offset"
        if self.sample_index is not None and self.sample_tokens is not None:
            return self.sample_index * self.sample_tokens, (
                f"the older checkpoint's sample_index {self.sample_index} × {self.sample_tokens} tokens"
            )
        return None, (
            "counted from the samples here: the older checkpoint has no total_tokens, not every token_offset, and no "
            "sample_index with a context_length; write one of them into its copy if the clock is to go on"
        )


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
    fields = {**(resume or {}), **document}
    numbers = {name: _number(fields, name) for name in ("sample_index", "total_tokens", *_SAMPLE_TOKENS)}
    lengths = [numbers[name] for name in _SAMPLE_TOKENS if numbers[name] is not None]
    clock = numbers["total_tokens"], lengths[0] if lengths else None
    if resume is not None and "datasets" in resume:
        try:
            return Payload(tuple(_ResumeState.model_validate(resume).datasets), numbers["sample_index"], *clock)
        except ValidationError as error:
            raise SnapshotInvalid(_explain(error, resume)) from None
    if numbers["sample_index"] is None:
        raise SnapshotInvalid("sample_index: found nothing; an older checkpoint has that, or resume_state.datasets")
    return Payload((), numbers["sample_index"], *clock)


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    number = fields.get(name)
    if number is not None and (type(number) is not int or not 0 <= number <= MAX_COUNTER):
        raise SnapshotInvalid(f"{name}: found {_short(number)}; expected an integer from 0 to 2^53 − 1")
    return number


def resume_point(payload: Payload, timeline: Timeline) -> ResumePoint:
    """Where a run goes on from an older checkpoint.

    Raises ``SnapshotInvalid`` naming spec, field, what was found and what was expected.
    """
    timeline, (tokens, source) = timeline.with_clock(0), payload.clock()
    if not payload.datasets:
        index = payload.sample_index or 0
        timeline = _by_clock(timeline, index, tokens)
        note = (
            f"resume: sample_index={index} (from an older checkpoint that names no dataset: so many samples are "
            "skipped from the beginning of the order)"
        )
        total = timeline.tokens_at(index)
        notes = note, f"resume: total_tokens={total} ({source})"
        return ResumePoint(
            sample_index=index, digest=None, total_tokens=total, base=timeline.initial(), notes=notes
        )
    if timeline.first.config.batching is not None:
        raise SnapshotInvalid(
            "resume_state.datasets: an older data loader's checkpoint names rows of files, but this run's order is "
            "made of batches from buckets, which it knows nothing of: begin the run anew, or give sample_index alone"
        )
    by_spec = _by_spec(payload.datasets, timeline.first.config.catalog.sources)
    state, notes = _state(by_spec, *_in_force(by_spec, timeline, tokens))
    notes = *notes, f"resume: total_tokens={state.total_tokens} ({source})"
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


def _by_clock(timeline: Timeline, sample_index: int, total_tokens: int | None) -> Timeline:
    """The timeline that has so many total tokens at a sample index; None: whatever it has. Raises
    ``SnapshotInvalid``."""
    if total_tokens is None:
        return timeline
    by_clock = timeline.with_clock(total_tokens - timeline.tokens_at(sample_index))
    if by_clock.tokens_at(sample_index) != total_tokens:
        raise SnapshotInvalid(f"total_tokens: found {total_tokens} at sample_index {sample_index}, {_OTHER_LENGTHS}")
    return by_clock


def _in_force(
    by_spec: Mapping[str, tuple[int, _Entry]], timeline: Timeline, tokens: int | None
) -> tuple[PipelineFactory, int]:
    """What is in force where the sources' samples and the clock say, by the run's phases and revisions; and the
    ``clock_offset``. ``tokens``: of the clock, None where they are those of the samples."""
    for segment in timeline.segments:
        specs, length = segment.factory.record.specs, segment.config.sequence_length
        samples = sum((entry.token_offset or 0) // length for spec, (_, entry) in by_spec.items() if spec in specs)
        total = samples * length if tokens is None else tokens
        by_clock = timeline.with_clock(total - samples * length)
        factory = by_clock.at(samples)
        same = (factory.record.specs, factory.config.sequence_length) == (specs, length)
        if same and by_clock.tokens_at(samples) == total:
            return factory, by_clock.clock_offset
    raise SnapshotInvalid(f"resume_state.datasets: token_offset adds up to a place {_OTHER_LENGTHS}")


def _state(
    by_spec: Mapping[str, tuple[int, _Entry]], factory: PipelineFactory, clock_offset: int
) -> tuple[State, tuple[str, ...]]:
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
    digest = _digest(sources, replace(factory.record.shape, clock_offset=clock_offset))
    state = State(
        sample_index=total,
        total_tokens=total * length + clock_offset,
        digest=digest,
        sources=tuple(sources),
        nodes=nodes.nodes,
        preserved=_preserved(unknown),
        imported=Imported(total, digest),
        clock_offset=clock_offset,
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
    clock = {"clock_offset": shape.clock_offset} if shape.clock_offset else {}
    text = canonical({"imported": places, "sample_tokens": shape.sample_tokens, **clock})
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

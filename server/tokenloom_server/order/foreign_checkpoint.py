"""A checkpoint of an older data loader as the beginning of a run: its cursors, counters and balances go on here.

Older payloads are plain JSON: ``{"resume_state": {"datasets": [{"spec", "shard", "row_offset", "token_offset"}]}}``,
where ``shard`` and ``token_offset`` may be missing, or only ``{"sample_index": N}``. Neither has a place in this run's
order: the first becomes a state that begins a lineage of its own, the second is a count of samples to skip from the
order's beginning. The token clock goes on in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    MAX_COUNTER,
    FileCursor,
    Imported,
    SourceState,
    State,
)
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.mixing import elsewhere
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.foreign_payload import Entry, Payload, normalised, read_entries
from tokenloom_server.order.notes import position_line
from tokenloom_server.order.returning import Position, names_of, position_of, returning
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.state_document import Shape
from tokenloom_server.order.timeline import Timeline

#: Every state carries what is preserved, and travels to every rank; bytes.
_PRESERVED_BYTES = 2**17

#: The entries with their positions, by their specs as the run has them.
_BySpec = Mapping[str, tuple[int, Entry]]
_OTHER_LENGTHS = (
    "before which the mixture file's phases change the sequence length (or the run was forked), but an older "
    "checkpoint's samples count as of one length: give the mixture file the sequence length of that place alone"
)


def resume_point(payload: Payload, timeline: Timeline) -> ResumePoint:
    """Where a run goes on from an older checkpoint.

    Raises ``SnapshotInvalid`` naming spec, field, what was found and what was expected.
    """
    timeline, (tokens, clock) = timeline.with_clock(0), payload.clock()
    if tokens is not None and tokens > MAX_COUNTER:
        raise SnapshotInvalid(f"total_tokens: {tokens} ({clock}); counters end at 2^53 − 1")
    if payload.nested is not None:
        entries = read_entries(payload.nested, timeline.first.config, payload.sample_tokens)
        payload = replace(payload, datasets=tuple(map(Entry.model_validate, entries)))
    if not payload.datasets:
        return _skipping(payload.sample_index or 0, timeline, tokens, clock)
    if timeline.first.config.batching is not None:
        raise SnapshotInvalid(
            "resume_state.datasets: an older data loader's checkpoint names rows of files, but this run's order is "
            "made of batches from buckets, which it knows nothing of: begin the run anew, or give sample_index alone"
        )
    by_spec = _by_spec(payload.datasets, timeline.segments[-1].factory)
    state, notes = _state(by_spec, *_in_force(by_spec, timeline, tokens))
    # That what comes back in a later phase can go on is found out now, and not when it is in force.
    returning(state.preserved, timeline.segments[-1].factory)
    return ResumePoint.of(state, (*notes, f"resume: total_tokens={state.total_tokens} ({clock})"))


def _skipping(index: int, timeline: Timeline, tokens: int | None, clock: str) -> ResumePoint:
    """After so many samples of the order, where the clock says ``tokens``; None: as many as these have."""
    linear = (
        timeline.tokens_at(index),
        *(index * each.config.sequence_length for each in timeline.segments),
    )
    total = linear[0] if tokens is None else tokens
    timelines = (timeline.with_clock(total - before) for before in linear)
    by_clock = next((each for each in timelines if each.tokens_at(index) == total), None)
    if by_clock is None:
        raise SnapshotInvalid(
            f"total_tokens: found {tokens} at sample_index {index}, {_OTHER_LENGTHS}"
        )
    note = f"resume: sample_index={index} (from an older checkpoint: so many samples of the order are skipped)"
    point = ResumePoint.of(by_clock.initial(), (note, f"resume: total_tokens={total} ({clock})"))
    return replace(point, sample_index=index, total_tokens=total, digest=None)


def _by_spec(entries: Sequence[Entry], last: PipelineFactory) -> _BySpec:
    """The entries by their specs as the run has them at its end. Raises ``SnapshotInvalid`` for one that
    comes twice."""
    by_spec: dict[str, tuple[int, Entry]] = {}
    for i, entry in enumerate(entries):
        spec = normalised(entry.spec, last.config, last.resources.base_dir)
        first, _ = by_spec.setdefault(spec, (i, entry))
        if first != i:
            raise SnapshotInvalid(
                f"resume_state.datasets.{i} (spec {entry.spec!r}): spec stands there already, at {first}; expected "
                "each once"
            )
    return by_spec


def _in_force(
    by_spec: _BySpec, timeline: Timeline, tokens: int | None
) -> tuple[PipelineFactory, int]:
    """What is in force where the sources' samples and the clock say, by the run's phases and revisions; and the
    ``clock_offset``. ``tokens``: of the clock, None where they are those of the samples."""
    for segment in timeline.segments:
        length = segment.config.sequence_length
        counted = [
            (i, *by_spec[spec])
            for i, spec in enumerate(segment.factory.record.specs)
            if spec in by_spec
        ]
        samples = sum(_tokens(*each, segment.factory) // length for each in counted)
        total = samples * length if tokens is None else tokens
        by_clock = timeline.with_clock(total - samples * length)
        factory = by_clock.at(samples)
        same = _counts_alike(factory) == _counts_alike(segment.factory)
        if same and by_clock.tokens_at(samples) == total:
            return factory, by_clock.clock_offset
    raise SnapshotInvalid(
        f"resume_state.datasets: token_offset adds up to a place {_OTHER_LENGTHS}"
    )


def _counts_alike(factory: PipelineFactory) -> tuple[Any, ...]:
    """What decides how an entry's samples are counted."""
    return factory.record.specs, factory.config.sequence_length, factory.config.measured_sources


def _state(
    by_spec: _BySpec, factory: PipelineFactory, clock_offset: int
) -> tuple[State, tuple[str, ...]]:
    """The state, and what was made of each entry, a line each."""
    length, specs = factory.config.sequence_length, factory.record.specs
    known = [spec in by_spec and not by_spec[spec][1].was_preserved for spec in specs]
    if by_spec.keys().isdisjoint(specs):
        raise SnapshotInvalid(
            "resume_state.datasets: none of its specs is in this mixture; found "
            f"{names_of(entry.spec for _, entry in by_spec.values())}, expected some of {names_of(specs)}"
        )
    pairs = [
        _source(i, *by_spec[spec], factory) if spec in by_spec else None
        for i, spec in enumerate(specs)
    ]
    sources = [pair[0] if pair is not None else SourceState() for pair in pairs]
    total = sum(source.samples for source in sources)
    if total * length > MAX_COUNTER:
        raise SnapshotInvalid(
            f"resume_state.datasets: token_offset adds up to {total * length}; counters end at 2^53 − 1"
        )
    balances = [
        by_spec[spec][1].counted_tokens // length * length if spec in by_spec else 0
        for spec in specs
    ]
    nodes = elsewhere.imported(factory.config, sources, balances, known)
    notes = [
        pair[1] if pair is not None else _new(spec, factory, baseline)
        for spec, pair, baseline in zip(specs, pairs, nodes.baselines, strict=True)
    ]
    unknown = [entry for spec, (_, entry) in by_spec.items() if spec not in specs]
    notes += [f"resume: spec={entry.spec} preserved: not in this mixture" for entry in unknown]
    digest = _digest(sources, factory.record.shape, clock_offset)
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


def _position(source: int, index: int, entry: Entry, factory: PipelineFactory) -> Position:
    return position_of(
        f"resume_state.datasets.{index} (spec {entry.spec!r})", entry, source, factory
    )


def _tokens(source: int, index: int, entry: Entry, factory: PipelineFactory) -> int:
    """The tokens that a source's counters begin with: the entry's. Where it has none, and a policy goes by what is left
    of the source, those of the rows that were read, by its size: as many as that policy finds missing."""
    if entry.counted_tokens or source not in factory.config.measured_sources:
        return entry.counted_tokens
    size = factory.record.size_estimates[source]
    return size.tokens_before(_position(source, index, entry, factory).rows)


def _source(
    source: int, index: int, entry: Entry, factory: PipelineFactory
) -> tuple[SourceState, str]:
    """Where an entry's source goes on, and a line about it."""
    length, shards = factory.config.sequence_length, factory.record.shard_paths[source]
    position, tokens = (
        _position(source, index, entry, factory),
        _tokens(source, index, entry, factory),
    )
    samples = tokens // length
    state = SourceState(
        cursor=position.cursor, samples=samples, rows=position.rows, tokens=samples * length
    )
    by_size = tokens > entry.counted_tokens
    note = (
        f"resume: {position_line(factory.record.specs[source], state, shards)} row_offset={entry.row_offset} "
        f"tokens={state.tokens} (from an older checkpoint"
        + (
            "; preserved until now, its balance begins as a new source's"
            if entry.was_preserved
            else ""
        )
        + ("" if entry.token_offset is not None else "; it has no token_offset, which counts as 0")
        + (
            "; for a policy that goes by what is left, its rows have these tokens, by its size"
            if by_size
            else ""
        )
        + ("" if position.is_counted else "; rows are counted from this shard on")
        + ")"
    )
    return state, note


def _preserved(entries: Sequence[Entry]) -> tuple[str, ...]:
    """What unknown sources had, as text that every later state carries."""
    try:
        texts = tuple(
            canonical(entry.model_dump(exclude_unset=True, exclude={"unknown"}))
            for entry in entries
        )
        size = sum(len(text.encode()) for text in texts)
    except (ValueError, RecursionError) as error:
        raise SnapshotInvalid(
            f"resume_state.datasets: what it has of {names_of(entry.spec for entry in entries)}, which this mixture "
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
    which = {"min": "the minimum", "mean": "the mean", "zero": "zero"}[
        factory.config.new_source_baseline
    ]
    return f"resume: spec={spec} new: starts at {which}, {baseline} tokens"


def _digest(sources: Sequence[SourceState], shape: Shape, clock_offset: int) -> int:
    """A hash of the place itself, since no sample before it is known: runs that go on from the same place have equal
    digests, and ranks that bring different places have different ones."""
    places = [
        [spec, cursor.epoch, shards[cursor.shard], cursor.row, cursor.tokens, source.samples]
        for spec, shards, source in zip(shape.specs, shape.shards, sources, strict=True)
        for cursor in [
            source.cursor if isinstance(source.cursor, FileCursor) else FileCursor(0, 0, 0)
        ]
    ]
    clock = {"clock_offset": clock_offset} if clock_offset else {}
    text = canonical({"imported": places, "sample_tokens": shape.sample_tokens, **clock})
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % DIGEST_MODULUS

"""Reading a snapshot: from its text, or from a ``resume_state``, to the state that a run goes on from.

A snapshot names a sample index and carries ``resume_state``, the state at the state boundary at or
before it; a restore goes forward from the one to the other and must meet the digest. Boundaries are
the same for all ranks, so every rank (and the server) writes the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.config.order_fields import changed_beside, differences, digest_of, refuse
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import ChildState, Imported, Skip, SourceState, State, digest_hex
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.snapshot_checks import (
    check_lanes,
    check_mixture,
    check_nodes,
    check_parts,
    check_place,
    check_position,
)
from tokenloom_server.order.snapshot_document import (
    KnownDataset,
    PreservedDataset,
    ResumeStateDocument,
    SnapshotDocument,
    read_document,
    read_resume_state,
)
from tokenloom_server.order.snapshot_encode import encode_state
from tokenloom_server.order.state_shape import Shape, ShapeAt


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
    #: What the snapshot says that each source has given, by spec; None for one from before the first join.
    counts: Mapping[str, Mapping[str, int]] | None = None
    #: (sample index, samples) of what its line passed over before it.
    passed: tuple[tuple[int, int], ...] = ()
    #: What was made of an older data loader's checkpoint, a line for each spec; empty for a snapshot.
    notes: tuple[str, ...] = ()
    #: The fields beside the order that the mixture file had otherwise when the snapshot was taken.
    changed: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: State, notes: tuple[str, ...] = ()) -> ResumePoint:
        """At a state, which begins a lineage of its own."""
        index, tokens = state.sample_index, state.total_tokens
        return cls(
            sample_index=index,
            digest=digest_hex(state.digest),
            total_tokens=tokens,
            base=state,
            notes=notes,
        )


def decode_state(resume_state: str, shape_at: ShapeAt) -> State:
    """Reads ``encode_state`` back. Raises ``SnapshotInvalid`` naming the field that does not fit the run."""
    return _state(read_resume_state(resume_state), shape_at)


def parse(
    text: str | bytes, template: Mapping[str, Any], shape_at: ShapeAt, config: RunConfig
) -> ResumePoint:
    """Reads and checks a snapshot against the run that it is to resume.

    ``template`` holds what the run's own snapshots say (without run_uid and generation, which are the
    caller's to compare); ``config`` is the run's. Raises ``SnapshotInvalid``, naming the field, both values and the
    remedy.
    """
    snapshot = read_document(text)
    for field, remedy in _REMEDIES.items():
        theirs, ours = getattr(snapshot, field), template.get(field)
        if field == "tokenizer" and _gives_the_same(snapshot, template):
            continue
        if theirs is not None and theirs != ours:
            if field == "config_digest":
                refuse(config, differences(config, snapshot.config), SnapshotInvalid)
                if theirs == digest_of(snapshot.config.get("config")):
                    continue  # it counts otherwise, which makes no difference
            raise SnapshotInvalid(
                f"the snapshot's {field} is {theirs!r}, this run's is {ours!r}: {remedy}"
            )
    if snapshot.resume_state is None:
        if snapshot.sample_index or int(snapshot.digest, 16) or snapshot.total_tokens:
            raise SnapshotInvalid(
                f"resume_state is missing, and sample_index is {snapshot.sample_index}, not 0"
            )
        base, passed = None, dict[int, int]()
    else:
        needed = (*_REMEDIES, "run_uid", "generation", "counts", "real_tokens")
        missing = [field for field in needed if getattr(snapshot, field) is None]
        if missing:
            raise SnapshotInvalid(
                f"{', '.join(missing)} missing: they must be there beside resume_state"
            )
        base = _state(snapshot.resume_state, shape_at)
        if base.sample_index > snapshot.sample_index:
            raise SnapshotInvalid(
                f"resume_state is at sample {base.sample_index}, beyond sample_index {snapshot.sample_index}"
            )
        passed = {skip.sample_index: skip.samples for skip in base.skips}
        passed |= {
            i: samples
            for i, samples in snapshot.resume_state.all_skips
            if i < snapshot.sample_index
        }
        shape = shape_at(snapshot.sample_index, base.clock_offset)
        check_position("", snapshot.sample_index, snapshot.total_tokens, snapshot.digest, shape)
    return ResumePoint(
        sample_index=snapshot.sample_index,
        digest=snapshot.digest,
        total_tokens=snapshot.total_tokens,
        base=base,
        run_uid=snapshot.run_uid,
        generation=snapshot.generation or 0,
        counts=snapshot.counts,
        passed=tuple(passed.items()),
        changed=changed_beside(config, snapshot.config),
    )


def _gives_the_same(snapshot: SnapshotDocument, template: Mapping[str, Any]) -> bool:
    """Whether the snapshot's engine gave for the run's rows what the run's own engine gave, with the same tokeniser."""
    same_files = (snapshot.tokenizer or {}).get("digest") == template["tokenizer"]["digest"]
    return (
        same_files
        and snapshot.engine_ids is not None
        and snapshot.engine_ids == template.get("engine_ids")
    )


_REMEDIES = {
    "run": "load it into that run",
    "stream": "load it into that stream",
    "order_version": "restore it with the Tokenloom release that wrote it",
    "seed": "restore the seed in the mixture file, or start a new run under another name (`run`)",
    "tokenizer": "restore that tokeniser and engine version, or start a new run under another name (`run`)",
    "config_digest": "restore the mixture file that the run began with, or start a new run under another name (`run`)",
    "manifest_digest": "restore the data files that the run began with, and the code of plugins and transforms, or "
    "start a new run under another name (`run`)",
}


def _state(resume: ResumeStateDocument, shape_at: ShapeAt) -> State:
    shape = shape_at(resume.sample_index, resume.clock_offset)
    check_mixture(resume, shape)
    check_position("resume_state.", resume.sample_index, resume.total_tokens, resume.digest, shape)
    datasets = [entry for entry in resume.datasets if isinstance(entry, KnownDataset)]
    began = resume.imported
    if began is not None and began.sample_index > resume.sample_index:
        raise SnapshotInvalid(
            f"resume_state.imported.sample_index is {began.sample_index}, beyond sample_index {resume.sample_index}"
        )
    sources = _sources(datasets, shape)
    nodes = tuple(
        tuple(
            ChildState(samples, tokens, credit, bool(out), *made)
            for samples, tokens, credit, out, *made in children
        )
        for children in resume.nodes
    )
    skips = _skips(resume)
    check_nodes(nodes, sources, resume.sample_index, sum(skip.samples for skip in skips), shape)
    return State(
        sample_index=resume.sample_index,
        total_tokens=resume.total_tokens,
        digest=int(resume.digest, 16),
        sources=sources,
        nodes=nodes,
        preserved=_preserved(resume),
        imported=Imported(began.sample_index, int(began.digest, 16)) if began is not None else None,
        clock_offset=resume.clock_offset,
        skips=skips,
    )


def _skips(resume: ResumeStateDocument) -> tuple[Skip, ...]:
    return tuple(map(Skip._make, resume.skips))


def _preserved(resume: ResumeStateDocument) -> tuple[str, ...]:
    entries = [entry for entry in resume.datasets if isinstance(entry, PreservedDataset)]
    return tuple(canonical(entry.model_dump(exclude={"unknown"})) for entry in entries)


def _sources(datasets: Sequence[KnownDataset], shape: Shape) -> tuple[SourceState, ...]:
    if [dataset.spec for dataset in datasets] != list(shape.specs):
        theirs, ours = {dataset.spec for dataset in datasets}, set(shape.specs)
        raise SnapshotInvalid(
            "resume_state.datasets does not list this run's sources in their order; "
            f"only there: {sorted(theirs - ours) or 'none'}, only here: {sorted(ours - theirs) or 'none'}"
        )
    sources = []
    for i, dataset in enumerate(datasets):
        where, shuffle = f"resume_state.datasets.{i}", shape.shuffles[i]
        if dataset.id != i:
            raise SnapshotInvalid(
                f"{where}: id is {dataset.id}, but {dataset.spec!r} is this run's source {i}"
            )
        if dataset.shuffle != shuffle:
            raise SnapshotInvalid(
                f"{where}: shuffle is {dataset.shuffle!r}, but {dataset.spec!r} of this run has {shuffle!r}"
            )
        check_place(where, i, dataset, shape)
        if (
            shape.total_tokens is None
            and dataset.token_offset != dataset.samples * shape.sample_tokens
        ):
            raise SnapshotInvalid(
                f"{where}: token_offset is {dataset.token_offset}, but {dataset.samples} samples of "
                f"{shape.sample_tokens} tokens have {dataset.samples * shape.sample_tokens}"
            )
        check_parts(i, dataset)
        check_lanes(i, dataset, shape)
        sources.append(dataset.state)
    return tuple(sources)


# Of another run, for forks and revisions: what a snapshot says, whether it fits or not.


class ForeignSnapshot(SnapshotDocument):
    """A snapshot as it is, of whichever run that has begun."""

    resume_state: ResumeStateDocument

    @property
    def revisions(self) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """(sample index, content) of the revisions that it carries."""
        return [
            (revision.sample_index, revision.content)
            for revision in self.resume_state.revisions or ()
        ]

    @property
    def skips(self) -> tuple[Skip, ...]:
        """As in ``State.skips``."""
        return _skips(self.resume_state)

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """Where its run was forked from."""
        return self.resume_state.origin

    @property
    def preserved(self) -> Sequence[str]:
        """As in ``State.preserved``."""
        return _preserved(self.resume_state)

    def sources(self) -> Sequence[KnownDataset]:
        """Where they stand at the sample index of ``resume_state``, which may lie before that of the snapshot."""
        return [
            dataset for dataset in self.resume_state.datasets if isinstance(dataset, KnownDataset)
        ]

    def at(self, state: State, shape: Shape) -> ForeignSnapshot:
        """The snapshot with a state of its run that lies after that of ``resume_state``."""
        resume_state = read_resume_state(encode_state(state, shape))
        return self.model_copy(update={"resume_state": resume_state})


def read_foreign(text: str | bytes) -> ForeignSnapshot | None:
    """What a snapshot says, whichever run it is of; None where that has not begun. Raises ``SnapshotInvalid``."""
    document = read_document(text)
    return (
        ForeignSnapshot.model_construct(**dict(document))
        if document.resume_state is not None
        else None
    )

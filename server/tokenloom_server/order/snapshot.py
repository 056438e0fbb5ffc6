"""Snapshots: a state of a run, sealed with all that it takes to go on from it, and plain for other tools to read.

A snapshot names a sample index and carries ``resume_state``, the state at the state boundary at or
before it; a restore goes forward from the one to the other and must meet the digest. Boundaries are
the same for all ranks, so every rank (and the server) writes the same text.
"""

from __future__ import annotations

import bz2
import json
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenloom_proto.resume import composed
from tokenloom_proto.seal import SNAPSHOT_FORMAT, SNAPSHOT_VERSION, unseal

from tokenloom_server.config.order_fields import changed_beside, differences, digest_of, refuse
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.state_document import (
    ANOTHER_RELEASE,
    COUNT,
    DIGEST,
    RESUME_STATE,
    Shape,
    ShapeAt,
    Table,
    all_skips,
    check,
    dataset,
    fitted,
    known,
    misfit,
    state_of,
)

#: A snapshot of 200 sources has at most 96 KB; larger mixtures are larger, but nothing honest is above this.
MAX_BYTES = 16 * 2**20

_SNAPSHOT = Table(
    {
        "format": str,
        "version": int,
        "run": str,
        "stream": str,
        "sample_index": COUNT,
        "digest": DIGEST,
        "total_tokens": COUNT,
    },
    {
        "run_uid": re.compile("(?s).{1,256}"),
        "generation": COUNT,
        "seed": int,
        "order_version": int,
        "config_digest": str,
        # What has this digest (``config``), and what is ``beside`` the order; packed.
        "config": str,
        "manifest_digest": str,
        "tokenizer": Table({}, {}, str),
        # Of what the engine gave when the run began; missing for bytes, and without text.
        "engine_ids": str,
        "resume_state": RESUME_STATE,
        # By spec, what each source gave up to the sample index: samples, tokens, real_tokens.
        "counts": Table({}, {}, Table({}, {}, COUNT)),
        "real_tokens": COUNT,
    },
)


def compose(template: Mapping[str, Any], resume_state: str, there: str) -> str:
    """The sealed snapshot at a sample index: ``there`` is the state at it, ``resume_state`` the one at the boundary
    before it, both as ``encode_state`` wrote them. The client does the same with what the wire carries."""
    state = json.loads(there)
    place = state["sample_index"], state["total_tokens"], state["digest"]
    return composed(template, resume_state, state, *place)


def _read(text: str | bytes) -> dict[str, Any]:
    """What a snapshot says, its ``config`` unpacked. Raises ``SnapshotInvalid`` naming the field."""
    if len(text) > MAX_BYTES:
        raise SnapshotInvalid(f"the snapshot has {len(text)} bytes; expected at most {MAX_BYTES}")
    try:
        document = unseal(text)
    except ValueError as error:
        raise SnapshotInvalid(str(error)) from None
    if document.get("format") != SNAPSHOT_FORMAT:
        raise SnapshotInvalid(f"format is {document.get('format')!r}, expected {SNAPSHOT_FORMAT!r}")
    version = document.get("version")
    if version != SNAPSHOT_VERSION:
        raise SnapshotInvalid(
            f"the snapshot has format version {version!r}, this release has {SNAPSHOT_VERSION}{ANOTHER_RELEASE}"
        )
    check(document, _SNAPSHOT, "")
    document["config"] = _unpacked(document.get("config"))
    return document


def _unpacked(text: str | None) -> dict[str, dict[str, Any]]:
    if text is None:
        return {}
    try:
        config: dict[str, Any] = json.loads(
            bz2.BZ2Decompressor().decompress(b64decode(text), MAX_BYTES)
        )
    except (ValueError, OSError, RecursionError) as error:
        raise misfit(
            "config", text, f"JSON, compressed by bzip2, in base 64, but {error}"
        ) from None
    check(config, Table({}, {}, dict), "config")
    return config


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
        return cls(
            sample_index=state.sample_index,
            digest=digest_hex(state.digest),
            total_tokens=state.total_tokens,
            base=state,
            notes=notes,
        )


def parse(
    text: str | bytes, template: Mapping[str, Any], shape_at: ShapeAt, config: RunConfig
) -> ResumePoint:
    """Reads and checks a snapshot against the run that it is to resume.

    ``template`` holds what the run's own snapshots say (without run_uid and generation, which are the
    caller's to compare); ``config`` is the run's. Raises ``SnapshotInvalid``, naming the field, both values and the
    remedy.
    """
    snapshot = _read(text)
    for field, remedy in _REMEDIES.items():
        theirs, ours = snapshot.get(field), template.get(field)
        if theirs in (None, ours) or (field == "tokenizer" and _gives_the_same(snapshot, template)):
            continue
        if field == "config_digest":
            refuse(config, differences(config, snapshot["config"]), SnapshotInvalid)
            if theirs == digest_of(snapshot["config"].get("config")):
                continue  # it counts otherwise, which makes no difference
        raise SnapshotInvalid(
            f"the snapshot's {field} is {theirs!r}, this run's is {ours!r}: {remedy}"
        )
    index, tokens, resume = (
        snapshot["sample_index"],
        snapshot["total_tokens"],
        snapshot.get("resume_state"),
    )
    if resume is None:
        if index or int(snapshot["digest"], 16) or tokens:
            raise SnapshotInvalid(f"resume_state is missing, and sample_index is {index}, not 0")
        base, passed = None, dict[int, int]()
    else:
        needed = (*_REMEDIES, "run_uid", "generation", "counts", "real_tokens")
        if missing := [field for field in needed if field not in snapshot]:
            raise SnapshotInvalid(
                f"{', '.join(missing)} missing: they must be there beside resume_state"
            )
        base = fitted(resume, shape_at)
        if base.sample_index > index:
            raise SnapshotInvalid(
                f"resume_state is at sample {base.sample_index}, beyond sample_index {index}"
            )
        passed = {skip.sample_index: skip.samples for skip in base.skips}
        passed |= {i: samples for i, samples in all_skips(resume) if i < index}
        if tokens != (expected := shape_at(index, base.clock_offset).tokens_at(index)):
            raise misfit("total_tokens", tokens, f"{expected}: those of {index} samples")
    return ResumePoint(
        sample_index=index,
        digest=snapshot["digest"],
        total_tokens=tokens,
        base=base,
        run_uid=snapshot.get("run_uid"),
        generation=snapshot.get("generation", 0),
        counts=snapshot.get("counts"),
        passed=tuple(passed.items()),
        changed=changed_beside(config, snapshot["config"]),
    )


def _gives_the_same(snapshot: Mapping[str, Any], template: Mapping[str, Any]) -> bool:
    """Whether the snapshot's engine gave for the run's rows what the run's own engine gave, with the same tokeniser."""
    ours = template["tokenizer"]["digest"], template.get("engine_ids")
    theirs = snapshot["tokenizer"].get("digest"), snapshot.get("engine_ids")
    return theirs == ours and None not in ours


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


class ForeignSnapshot(NamedTuple):
    """A snapshot as it is, of whichever run that has begun: for forks and revisions."""

    run: str
    run_uid: str | None
    generation: int | None
    sample_index: int
    total_tokens: int
    digest: str
    config_digest: str | None
    manifest_digest: str | None
    tokenizer: Mapping[str, str] | None
    resume_state: Mapping[str, Any]
    state: State
    #: Where they stand in it, as ``datasets`` has them.
    sources: Sequence[Mapping[str, Any]]

    @property
    def revisions(self) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """(sample index, content) of the revisions that it carries."""
        carried = self.resume_state.get("revisions", ())
        return [(one["sample_index"], one["content"]) for one in carried]

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """Where its run was forked from."""
        return self.resume_state.get("origin")

    def at(self, state: State, shape: Shape) -> ForeignSnapshot:
        """With a state of its run that lies after that of ``resume_state``."""
        sources = [dataset(i, source, shape) for i, source in enumerate(state.sources)]
        return self._replace(state=state, sources=sources)


def read_foreign(text: str | bytes) -> ForeignSnapshot | None:
    """What a snapshot says, whichever run it is of; None where that has not begun. Raises ``SnapshotInvalid``."""
    fields = _read(text)
    resume = fields.get("resume_state")
    if resume is None:
        return None
    names = ForeignSnapshot._fields[:-2]
    return ForeignSnapshot._make([*map(fields.get, names), state_of(resume), known(resume)])

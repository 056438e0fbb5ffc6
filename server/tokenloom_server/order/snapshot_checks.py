"""Whether a ``resume_state`` fits the run that is to go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    MAX_COUNTER,
    ChildState,
    EpochCursor,
    FileCursor,
    Lane,
    PackedCursor,
    RowCounts,
    SourceState,
    WindowCursor,
    row_cursor,
    tokens_in_row,
)
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.snapshot_document import (
    SKIPPED,
    FileDataset,
    KnownDataset,
    ResumeStateDocument,
    lane_of,
)
from tokenloom_server.order.state_shape import Shape


def check_mixture(resume: ResumeStateDocument, shape: Shape) -> None:
    """Whether the state was made under the mixture that is in force there."""
    theirs = [node.model_dump(exclude_none=True) for node in resume.mixture]
    for actual, expected in zip_longest(theirs, shape.mixture):
        # A name decides no order.
        if (
            actual is None
            or expected is None
            or {**actual, "alias": ""} != {**expected, "alias": ""}
        ):
            raise SnapshotInvalid(
                f"resume_state.mixture at sample {resume.sample_index} has {_shortened(actual)}, but in force there is "
                f"{_shortened(expected)}: a revision was dropped or made elsewhere; use that run's ledger, or an empty "
                "one with the same mixture file, or fork a new run from this state"
            )
    # Limits, files and rows that are left out are not among what describes a node.
    changes = [revision for revision in resume.revisions or () if "skips" not in revision.content]
    in_force = [revision for revision in changes if revision.sample_index <= resume.sample_index]
    made_under = (
        (in_force[-1].sample_index, canonical_content(in_force[-1].content)) if in_force else None
    )
    if made_under != shape.revision:
        raise SnapshotInvalid(
            f"resume_state.revisions at sample {resume.sample_index} has {_of_revision(made_under)}, but in force "
            f"there is {_of_revision(shape.revision)}: it was dropped, or made on another line of the run; use that "
            "run's ledger, or resume from a state of the present line"
        )


def canonical_content(content: Mapping[str, Any]) -> str:
    """What a revision makes of the run, as canonical JSON: not when it was made."""
    return canonical(
        {key: value for key, value in content.items() if key not in ("generation", "known_from")}
    )


def _of_revision(revision: tuple[int, str] | None) -> str:
    return f"the revision from sample {revision[0]} on" if revision is not None else "none"


def _shortened(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 200 else text[:199] + "…"


def check_position(
    where: str, sample_index: int, total_tokens: int, digest: str, shape: Shape
) -> None:
    if int(digest, 16) >= DIGEST_MODULUS:
        raise SnapshotInvalid(f"{where}digest {digest!r} is not below 2^127 − 1")
    expected = shape.tokens_at(sample_index)
    if total_tokens != expected:
        of = "" if shape.total_tokens is not None else f" of {shape.sample_tokens} tokens"
        raise SnapshotInvalid(
            f"{where}total_tokens is {total_tokens}, but {sample_index} samples{of} have {expected}"
        )


def check_lanes(i: int, dataset: KnownDataset, shape: Shape) -> None:
    """A source of several lanes has all of them, and gave what they gave; before its first sample it has none."""
    where, several = f"resume_state.datasets.{i}: ", shape.lanes[i]
    expected = several if several > 1 and dataset.samples else 0
    if len(dataset.lanes) != expected:
        raise SnapshotInvalid(
            f"{where}lanes has {len(dataset.lanes)} entries, but this run's source has {expected}"
        )
    lanes = [lane_of(entry) for entry in dataset.lanes]
    for field in ("samples", "rows", *RowCounts._fields) if lanes else ():
        total = sum(getattr(entry, field) for entry in dataset.lanes)
        if total != getattr(dataset, field):
            raise SnapshotInvalid(
                f"{where}{field} is {getattr(dataset, field)}, but its lanes have {total}"
            )
    if lanes and dataset.cursor not in [lane.cursor for lane in lanes]:
        raise SnapshotInvalid(
            f"{where}none of its lanes stands where the source does, at {dataset.cursor}"
        )
    for number, lane in enumerate(lanes):
        check_place(f"{where}lanes.{number}", i, lane, shape)


#: The field that only a cursor of the kind has.
_NAMED_BY = {FileCursor: "row_offset", WindowCursor: "window_row", EpochCursor: "epoch_rows"}


def check_place(where: str, source: int, standing: KnownDataset | Lane, shape: Shape) -> None:
    """Checks that a source, or a lane of it, stands where this run's source can stand, and in a file that it has."""
    cursor, kind, shards = standing.cursor, shape.cursor_kind(source), shape.shards[source]
    first = row_cursor(cursor)
    if first is None and standing.samples:
        raise SnapshotInvalid(
            f"{where}: samples is {standing.samples}, but it has no {_NAMED_BY[kind]}, as at its beginning: take the "
            "state as it was written"
        )
    if first is not None and not isinstance(first, kind):
        raise SnapshotInvalid(
            f"{where}: it has {_NAMED_BY[type(first)]}, but where this run's source stands is said by "
            f"{_NAMED_BY[kind]}: restore the mixture file that the state was made under"
        )
    if isinstance(first, FileCursor) and first.shard >= len(shards):
        raise SnapshotInvalid(
            f"{where}: shard_index is {first.shard}, but this run's source has {len(shards)} files"
        )
    if isinstance(standing, FileDataset) and standing.shard != shards[standing.shard_index]:
        raise SnapshotInvalid(
            f"{where}: shard {standing.shard!r} at {standing.shard_index} is not in this run's manifest of "
            f"{standing.spec!r}"
        )
    is_packed, tokens = isinstance(cursor, PackedCursor), tokens_in_row(cursor)
    if (is_packed and not shape.best_fit) or (tokens and shape.best_fit):
        field = "packed_samples" if is_packed else "row_token_offset"
        count = cursor.samples if isinstance(cursor, PackedCursor) else tokens
        raise SnapshotInvalid(
            f"{where}: {field} is {count}, but this run's packing has no such place: restore the mixture file that the "
            "state was made under, or fork a new run from it"
        )


#: What is a part of another number of a source.
_PARTS = {"bad_rows": "rows", "filtered_rows": "rows", "padding_tokens": "token_offset"}


def check_parts(i: int, dataset: KnownDataset) -> None:
    """Checks that rows without tokens, padding and what was passed over are a part of all that the source gave; without
    samples that were passed over the latter is nothing."""
    skipped = dict(zip(SKIPPED, ("samples", "rows", "token_offset", "padding_tokens"), strict=True))
    for field, name in (_PARTS | skipped).items():
        part, whole = getattr(dataset, field), getattr(dataset, name)
        if part > whole or (field in skipped and part and not dataset.skipped_samples):
            raise SnapshotInvalid(
                f"resume_state.datasets.{i}: {field} is {part}, but it is a part of {name}, which is {whole}, and "
                f"skipped_samples is {dataset.skipped_samples}"
            )


def check_nodes(
    nodes: tuple[tuple[ChildState, ...], ...],
    sources: tuple[SourceState, ...],
    sample_index: int,
    skipped: int,
    shape: Shape,
) -> None:
    """The tree has the run's shape, what a node counts of a child is what the child says itself, and all are those up
    to a sample index and so many that were passed over."""
    counts, expected = (
        [len(children) for children in nodes],
        [len(ids) for ids in shape.nodes.values()],
    )
    if counts != expected:
        raise SnapshotInvalid(
            f"resume_state.nodes: the nodes have {counts} children, but this run's mixture has {expected}"
        )
    by_number = dict(zip(shape.nodes, nodes, strict=True))
    issued = {
        number: sum(child.samples for child in children) for number, children in by_number.items()
    }
    tokens = {
        number: sum(child.tokens for child in children) for number, children in by_number.items()
    }
    if issued[0] + shape.left_samples != sample_index + skipped:
        passed = f", and {skipped} were passed over" if skipped else ""
        raise SnapshotInvalid(
            f"resume_state.nodes.0: its children have {issued[0]} samples, but sample_index is {sample_index}{passed}"
        )
    for children, (number, ids) in zip(nodes, shape.nodes.items(), strict=True):
        for i, (child, child_id) in enumerate(zip(children, ids, strict=True)):
            own, is_node = divmod(child_id, 2)
            samples = issued[own] if is_node else sources[own].samples
            own_tokens = samples * shape.sample_tokens
            if shape.total_tokens is not None:
                own_tokens = tokens[own] if is_node else sources[own].tokens
            exhausted = child.exhausted if is_node else sources[own].exhausted
            if (child.samples, child.tokens, child.exhausted) != (samples, own_tokens, exhausted):
                raise SnapshotInvalid(
                    f"resume_state.nodes.{number}.{i}: {child} is not what {'node' if is_node else 'source'} {own} "
                    f"says itself: {samples} samples, exhausted {exhausted}"
                )
            if abs(child.credit) > MAX_COUNTER:
                raise SnapshotInvalid(
                    f"resume_state.nodes.{number}.{i}: credits are within ±2^53, found {child.credit}"
                )

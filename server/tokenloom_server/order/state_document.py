"""``resume_state``: a state as the document that ledgers, snapshots and trainers have of it.

``Table``\\ s say which fields it has, and what each may be. It is written as canonical JSON, and only where it is again
what was read does a state come out of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from tokenloom_proto.seal import SNAPSHOT_VERSION, canonical, strict_json

from tokenloom_server.core.state import (
    MAX_COUNTER,
    ChildState,
    EpochCursor,
    FileCursor,
    Imported,
    Lane,
    PackedCursor,
    RowCounts,
    Skip,
    SourceState,
    State,
    WindowCursor,
    digest_hex,
    row_cursor,
    tokens_in_row,
)
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.mixing.policy import MAX_SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run's states look like: a state that does not fit is refused before anything uses it."""

    specs: tuple[str, ...]
    """The sources' specs, by source id."""
    shards: tuple[tuple[str, ...], ...]
    """Each source's shard paths."""
    nodes: Mapping[int, tuple[int, ...]]
    """By node id, ascending, the children's stable ids: 2 × source id, or 2 × node id + 1."""
    sample_tokens: int
    """Tokens of a sample that begins here."""
    names: tuple[str | None, ...]
    """The sources' aliases."""
    shuffles: tuple[str, ...]
    """The sources' ``shuffle``."""
    lanes: tuple[int, ...]
    """How many lanes the sources have."""
    mixture: tuple[Mapping[str, Any], ...]
    """The nodes as ``resume_state`` describes them."""
    revision: tuple[int, str] | None = None
    """The newest revision in force: its sample index, and the ``canonical_content`` of it."""
    best_fit: bool = False
    """Whether rows are packed together, so that a cursor counts the samples that they have given."""
    in_batches: bool = False
    """Whether the sources give batches of rows."""
    left_samples: int = 0
    """Samples before a fork whose sources the run does not have."""
    total_tokens: Callable[[int], int] | None = None
    """The run's total tokens at a sample index, where they are not those of so many samples of one length."""

    def cursor_kind(self, source: int) -> type[FileCursor] | type[WindowCursor] | type[EpochCursor]:
        """What a cursor of a source is, or the first row of what is packed together."""
        if self.in_batches:
            return EpochCursor
        return WindowCursor if self.shuffles[source] == "rows" else FileCursor

    def tokens_at(self, sample_index: int) -> int:
        """The run's total tokens at a sample index."""
        return (
            self.total_tokens(sample_index)
            if self.total_tokens is not None
            else sample_index * self.sample_tokens
        )


#: The shape that the states of a run have at a sample index, under a ``clock_offset``.
ShapeAt = Callable[[int, int], Shape]


# --- what a document may have --------------------------------------------------------------------


class Table(NamedTuple):
    """The fields of a JSON object: which there are, which there may be, and which others."""

    needed: dict[str, Any]
    optional: dict[str, Any]
    others: Any = None


def misfit(path: str, found: object, expected: object) -> SnapshotInvalid:
    """The error for a value that cannot be there."""
    return SnapshotInvalid(f"{path.lstrip('.')}: found {repr(found)[:200]}; expected {expected}")


def check(value: Any, kind: Any, path: str) -> None:
    """Raises ``SnapshotInvalid`` where a value of a JSON document is not of a kind: a type, a range of whole numbers, a
    pattern of texts, the fields of a ``Table``, one kind for each value of a [list], or for all of them; or what a
    function of the value says."""
    if isinstance(kind, range):
        if type(value) is not int or value not in kind:
            raise misfit(path, value, f"a whole number from {kind.start} to {kind.stop - 1}")
    elif isinstance(kind, re.Pattern):
        if type(value) is not str or not kind.fullmatch(value):
            raise misfit(path, value, f"a text of the form {kind.pattern}")
    elif isinstance(kind, type):
        if type(value) is not kind:
            raise misfit(path, value, kind.__name__)
    elif isinstance(kind, Table):
        check(value, dict, path)
        needed, optional, others = kind
        for key in sorted(needed.keys() - value.keys()):
            raise misfit(f"{path}.{key}", None, f"this field{ANOTHER_RELEASE}")
        for key, own in value.items():
            own_kind = needed.get(key) or optional.get(key, others)
            if own_kind is None:
                raise misfit(f"{path}.{key}", own, f"no such field{ANOTHER_RELEASE}")
            if own_kind is not COUNT or type(own) is not int or not 0 <= own <= MAX_COUNTER:
                check(own, own_kind, f"{path}.{key}")
    elif isinstance(kind, list):
        check(value, list, path)
        if len(kind) > 1 and len(value) != len(kind):
            raise misfit(path, value, f"a list of {len(kind)}")
        for i, own in enumerate(value):
            check(own, kind[i % len(kind)], f"{path}.{i}")
    else:
        check(value, kind(value), path)


ANOTHER_RELEASE = ": restore it with the Tokenloom release that wrote it"

COUNT = range(MAX_COUNTER + 1)
#: Hexadecimal, below the modulus.
DIGEST = re.compile("(?!7f{31})[0-7][0-9a-f]{31}")
_SIGNED = range(-MAX_COUNTER, MAX_COUNTER + 1)

#: The fields that say where a source, or a lane of it, stands: those of its cursor.
_ROWS: dict[Any, tuple[str, ...]] = {
    FileCursor: ("epoch", "shard_index", "row_offset", "row_token_offset"),
    WindowCursor: ("epoch", "window", "window_row", "row_token_offset"),
}
_PLACES = _ROWS | {EpochCursor: ("epoch", "epoch_rows")}
#: The fields that a source has where some of its samples were passed over, and what each is a part of.
_SKIPPED = {
    "skipped_samples": "samples",
    "skipped_rows": "rows",
    "skipped_tokens": "token_offset",
    "skipped_padding_tokens": "padding_tokens",
}
_PARTS = {"bad_rows": "rows", "filtered_rows": "rows", "padding_tokens": "token_offset"} | _SKIPPED


def _entry(entry: Any, is_source: bool) -> Any:
    """The table for a source, or a lane of it."""
    if type(entry) is not dict:
        return dict
    if is_source and entry.get("unknown") is True:
        return _PRESERVED
    places = _PLACES if is_source else _ROWS
    keys = next((keys for keys in places.values() if keys[1] in entry), ())
    if keys and "packed_samples" in entry:
        keys = (*keys[:-1], "packed_samples")
    return _with_place(keys, is_source)


@cache
def _with_place(keys: tuple[str, ...], is_source: bool) -> Table:
    needed, optional, _ = _SOURCE if is_source else _LANE
    place = dict.fromkeys(keys, COUNT)
    if "packed_samples" in keys:
        place["packed_samples"] = COUNT[1:]
    file = {"shard": str} if is_source and "shard_index" in keys else {}
    return Table(needed | place | file, optional)


def _child(row: Any) -> Any:
    """Samples, tokens, credit, exhausted; and where the node's policy makes the weights itself: weight, total."""
    kinds = [COUNT, COUNT, _SIGNED, range(2)]
    return [*kinds, range(MAX_SUM + 1), COUNT] if type(row) is list and len(row) == 6 else kinds


_LANE = Table({"samples": COUNT, "rows": COUNT}, dict.fromkeys(RowCounts._fields, COUNT))
_SOURCE = Table(
    _LANE.needed | {"id": COUNT, "spec": str, "token_offset": COUNT},
    _LANE.optional
    | dict.fromkeys((*_SKIPPED, "dropped_tokens"), COUNT)
    | {
        "alias": str,
        "shuffle": re.compile("none|shards|rows"),
        "exhausted": bool,
        "lanes": [partial(_entry, is_source=False)],
        # Hexadecimal: more than readers hold in a number.
        "owed": re.compile("-?[0-9a-f]{1,24}"),
    },
)
#: A source of an older data loader's checkpoint that no mixture of the run has, as that loader wrote it.
_PRESERVED = Table({"spec": str, "unknown": bool}, {}, others=lambda value: type(value))
#: A node of the mixture; of each child 2 × source id (or 2 × node id + 1), its weight, "paused" or "dropped".
_NODE = Table({"id": COUNT, "policy": str, "children": [list]}, {"alias": str, "interpolate": str})
RESUME_STATE = Table(
    {
        "version": range(SNAPSHOT_VERSION, SNAPSHOT_VERSION + 1),
        "sample_index": COUNT,
        "digest": DIGEST,
        "total_tokens": COUNT,
        "datasets": [partial(_entry, is_source=True)],
        # By node, as in ``mixture``, by child.
        "nodes": [[_child]],
        # The mixture in force, by node id, for readers without the mixture file.
        "mixture": [_NODE],
    },
    {
        "imported": Table({"sample_index": COUNT, "digest": DIGEST}, {}),
        "clock_offset": _SIGNED,
        # What was passed over so far: sample index, samples and tokens.
        "skips": [[COUNT, COUNT, COUNT]],
        # What is passed over (``skips``), the revision in force, and all that are to come.
        "revisions": [Table({"sample_index": COUNT, "content": dict}, {})],
        # Where the run was forked from.
        "origin": dict,
    },
)

# --- written -------------------------------------------------------------------------------------


def encode_state(
    state: State,
    shape: Shape,
    revisions: Sequence[Mapping[str, Any]] = (),
    origin: Mapping[str, Any] | None = None,
) -> str:
    """``resume_state``: the canonical JSON of a state. ``revisions``: what changed the mixture file's own rules;
    ``origin``: where the run was forked from."""
    fields = {
        "version": SNAPSHOT_VERSION,
        "sample_index": state.sample_index,
        "digest": digest_hex(state.digest),
        "total_tokens": state.total_tokens,
        "datasets": [
            *(dataset(i, source, shape) for i, source in enumerate(state.sources)),
            *({**json.loads(entry), "unknown": True} for entry in state.preserved),
        ],
        "nodes": [_node(children) for children in state.nodes],
        "mixture": shape.mixture,
    }
    began = state.imported
    optional = {
        "imported": began
        and {"sample_index": began.sample_index, "digest": digest_hex(began.digest)},
        "clock_offset": state.clock_offset,
        "skips": state.skips,
        "revisions": revisions,
        "origin": origin,
    }
    return canonical(fields | {name: value for name, value in optional.items() if value})


def dataset(i: int, source: SourceState, shape: Shape) -> dict[str, Any]:
    """A source of a run, by its id, as ``datasets`` has it."""
    entry = _given(source)
    entry |= {"id": i, "spec": shape.specs[i], "token_offset": source.tokens}
    if "shard_index" in entry:
        entry["shard"] = shape.shards[i][entry["shard_index"]]
    if shape.shuffles[i] != "none":
        entry["shuffle"] = shape.shuffles[i]
    if source.exhausted:
        entry |= {"exhausted": True, "dropped_tokens": source.dropped_tokens}
    if source.skipped_samples:
        entry |= {name: getattr(source, name) for name in _SKIPPED}
    if source.owed:
        entry["owed"] = f"{source.owed:x}"
    if source.lanes:
        entry["lanes"] = [_given(lane) for lane in source.lanes]
    if shape.names[i] is not None:
        entry["alias"] = shape.names[i]
    return entry


def _given(standing: SourceState | Lane) -> dict[str, Any]:
    """What a source has given, or a lane of it, and where it stands: by names that say what that is, none at its
    beginning."""
    entry = {"samples": standing.samples, "rows": standing.rows}
    cursor, first = standing.cursor, row_cursor(standing.cursor)
    if first is not None:
        kind: Any = type(first)
        entry |= zip(_PLACES[kind], _values_of(kind)(first), strict=True)
    if isinstance(cursor, PackedCursor):
        del entry["row_token_offset"]
        entry["packed_samples"] = cursor.samples
    if any(standing.row_counts):
        counts = zip(RowCounts._fields, standing.row_counts, strict=True)
        entry |= {name: count for name, count in counts if count}
    return entry


@cache
def _values_of(kind: Any) -> attrgetter[tuple[int, ...]]:
    return attrgetter(*kind.__match_args__)


def _node(children: Sequence[ChildState]) -> list[list[int]]:
    rows = [[child.samples, child.tokens, child.credit, int(child.exhausted)] for child in children]
    if any(child.weight or child.total for child in children):
        for row, child in zip(rows, children, strict=True):
            row += child.weight, child.total
    return rows


# --- read ----------------------------------------------------------------------------------------


def read(text: str) -> dict[str, Any]:
    """A ``resume_state``, whichever run it is of. Raises ``SnapshotInvalid`` naming the field."""
    try:
        resume: dict[str, Any] = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise SnapshotInvalid(f"resume_state does not parse: {error}") from None
    check(resume, RESUME_STATE, "resume_state")
    return resume


def known(resume: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its sources that the run has."""
    return [entry for entry in resume["datasets"] if "unknown" not in entry]


def all_skips(resume: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
    """(sample index, samples) of all that its run passes over."""
    contents = [one["content"] for one in resume.get("revisions", ())]
    skips: Sequence[tuple[int, int]] = next(
        (own["skips"] for own in (*contents, resume.get("origin", {})) if "skips" in own), ()
    )
    return skips


def state_of(resume: Mapping[str, Any]) -> State:
    """The state that it says, whether it fits a run or not."""
    began = resume.get("imported")
    return State(
        sample_index=resume["sample_index"],
        total_tokens=resume["total_tokens"],
        digest=int(resume["digest"], 16),
        sources=tuple(map(_state, known(resume))),
        nodes=tuple(
            tuple(
                ChildState(samples, tokens, credit, bool(out), *made)
                for samples, tokens, credit, out, *made in children
            )
            for children in resume["nodes"]
        ),
        preserved=tuple(
            canonical({key: value for key, value in entry.items() if key != "unknown"})
            for entry in resume["datasets"]
            if "unknown" in entry
        ),
        imported=began and Imported(began["sample_index"], int(began["digest"], 16)),
        clock_offset=resume.get("clock_offset", 0),
        skips=tuple(map(Skip._make, resume.get("skips", ()))),
    )


def _state(entry: Mapping[str, Any]) -> SourceState:
    cursor, samples, rows, row_counts = _standing(entry)
    return SourceState(
        cursor,
        samples,
        rows,
        entry["token_offset"],
        row_counts=row_counts,
        lanes=tuple(map(_standing, entry.get("lanes", ()))),
        owed=int(entry.get("owed", "0"), 16),
        **{
            name: entry[name]
            for name in ("dropped_tokens", "exhausted", *_SKIPPED)
            if name in entry
        },
    )


def _standing(entry: Mapping[str, Any]) -> Lane:
    cursor: Any = None
    for kind, keys in _PLACES.items():
        if keys[1] in entry:
            cursor = kind(*[entry.get(key, 0) for key in keys])
    if "packed_samples" in entry:
        cursor = PackedCursor(cursor, entry["packed_samples"])
    counts = {name: entry[name] for name in RowCounts._fields if name in entry}
    return Lane(cursor, entry["samples"], entry["rows"], RowCounts(**counts))


def decode_state(resume_state: str, shape_at: ShapeAt) -> State:
    """Reads ``encode_state`` back. Raises ``SnapshotInvalid`` naming the field that does not fit the run."""
    return fitted(read(resume_state), shape_at)


# --- whether it fits the run ---------------------------------------------------------------------

_OTHER_MIXTURE = (
    "a revision was dropped or made elsewhere; use that run's ledger, or an empty one with the same mixture file, or "
    "fork a new run from this state"
)
_OTHER_REVISION = (
    "it was dropped, or made on another line of the run; use that run's ledger, or resume from a state of the present "
    "line"
)
_OTHER_RULES = (
    "a source of this run stands elsewhere; restore the mixture file that the state was made under, or fork a new run "
    "from it"
)


def _expect(path: str, found: object, expected: object, reason: str) -> None:
    """Raises ``SnapshotInvalid`` where a value is not the one that the run has there."""
    if found != expected:
        raise misfit(f"resume_state.{path}", found, f"{repr(expected)[:200]}: {reason}")


def fitted(resume: Mapping[str, Any], shape_at: ShapeAt) -> State:
    """The state that it says. Raises ``SnapshotInvalid`` naming what does not fit the run."""
    state = state_of(resume)
    index = state.sample_index
    shape = shape_at(index, state.clock_offset)
    for i, nodes in enumerate(zip_longest(resume["mixture"], shape.mixture)):
        # A name decides no order.
        theirs, ours = ({**(node or {}), "alias": ""} for node in nodes)
        _expect(f"mixture.{i}", theirs, ours, _OTHER_MIXTURE)
    # Limits, files and rows that are left out are not among what describes a node.
    in_force = [
        (one["sample_index"], canonical_content(one["content"]))
        for one in resume.get("revisions", ())
        if one["sample_index"] <= index and "skips" not in one["content"]
    ]
    _expect("revisions", in_force[-1] if in_force else None, shape.revision, _OTHER_REVISION)
    _expect("total_tokens", state.total_tokens, shape.tokens_at(index), f"those of {index} samples")
    if state.imported is not None:
        began = state.imported.sample_index
        check(began, range(index + 1), "resume_state.imported.sample_index")
    entries = known(resume)
    specs = [entry["spec"] for entry in entries]
    if specs != [*shape.specs]:
        raise SnapshotInvalid(
            "resume_state.datasets does not list this run's sources in their order; "
            f"only there: {sorted({*specs}.difference(shape.specs)) or 'none'}, "
            f"only here: {sorted({*shape.specs}.difference(specs)) or 'none'}"
        )
    for i, (entry, source) in enumerate(zip(entries, state.sources, strict=True)):
        _check_source(i, entry, source, shape)
    _check_nodes(state, shape)
    return state


def canonical_content(content: Mapping[str, Any]) -> str:
    """What a revision makes of the run, as canonical JSON: not when it was made."""
    return canonical(
        {key: value for key, value in content.items() if key not in ("generation", "known_from")}
    )


def _check_source(i: int, entry: Mapping[str, Any], source: SourceState, shape: Shape) -> None:
    """A source is the run's own, stands where that can stand, and gave what it and its lanes say."""
    path = f"datasets.{i}"
    _check_place(path, i, source, shape)
    several = shape.lanes[i] if shape.lanes[i] > 1 and source.samples else 0
    _expect(
        f"{path}.lanes", len(source.lanes), several, "all of them, and none before its first sample"
    )
    for part, whole in _PARTS.items():
        if part in entry and entry[part] > (most := entry.get(whole, 0)):
            raise misfit(
                f"resume_state.{path}.{part}", entry[part], f"at most {most}, as a part of {whole}"
            )
    if shape.total_tokens is None:
        tokens = source.samples * shape.sample_tokens
        _expect(
            f"{path}.token_offset", source.tokens, tokens, f"the tokens of {source.samples} samples"
        )
    if source.lanes:
        names = ("samples", "rows", *RowCounts._fields)
        standing: list[SourceState | Lane] = [source, *source.lanes]
        own, *parts = ((each.samples, each.rows, *each.row_counts) for each in standing)
        for name, total, *of_lanes in zip(names, own, *parts, strict=True):
            _expect(f"{path}.{name}", total, sum(of_lanes), "what its lanes have")
        if source.cursor not in [lane.cursor for lane in source.lanes]:
            raise misfit(
                f"resume_state.{path}", source.cursor, "to stand where one of its lanes does"
            )
    for number, lane in enumerate(source.lanes):
        _check_place(f"{path}.lanes.{number}", i, lane, shape)
    ours = dataset(i, source, shape)
    for key in sorted((entry.keys() | ours.keys()) - {"alias"}) if entry != ours else ():
        _expect(
            f"{path}.{key}", entry.get(key), ours.get(key), f"as this run writes {shape.specs[i]!r}"
        )


def _check_place(path: str, source: int, standing: SourceState | Lane, shape: Shape) -> None:
    """A source, or a lane of it, stands where this run's source can stand, and in a file that it has."""
    cursor, first = standing.cursor, row_cursor(standing.cursor)
    if first is not None or standing.samples:
        keys, ours = _PLACES.get(type(first), ()), _PLACES[shape.cursor_kind(source)]
        _expect(path, keys[1:3], ours[1:3], _OTHER_RULES)
    if isinstance(first, FileCursor):
        check(first.shard, range(len(shape.shards[source])), f"resume_state.{path}.shard_index")
    if shape.best_fit:
        _expect(f"{path}.row_token_offset", tokens_in_row(cursor), 0, _OTHER_RULES)
    elif isinstance(cursor, PackedCursor):
        _expect(f"{path}.packed_samples", cursor.samples, None, _OTHER_RULES)


def _check_nodes(state: State, shape: Shape) -> None:
    """The tree has the run's shape, what a node counts of a child is what the child says itself, and all are those up
    to the sample index and those that were passed over."""
    sizes = [len(children) for children in state.nodes]
    _expect("nodes", sizes, [len(ids) for ids in shape.nodes.values()], "so many children each")
    by_number = dict(zip(shape.nodes, state.nodes, strict=True))
    sums = {
        number: (sum(child.samples for child in own), sum(child.tokens for child in own))
        for number, own in by_number.items()
    }
    passed_through = state.sample_index + sum(skip.samples for skip in state.skips)
    _expect(
        "nodes.0",
        sums[0][0] + shape.left_samples,
        passed_through,
        "samples up to sample_index, and what was passed over",
    )
    for number, children in by_number.items():
        for i, (child, child_id) in enumerate(zip(children, shape.nodes[number], strict=True)):
            own, is_node = divmod(child_id, 2)
            if is_node:
                samples, tokens, exhausted = *sums[own], child.exhausted
            else:
                source = state.sources[own]
                samples, tokens, exhausted = source.samples, source.tokens, source.exhausted
            if shape.total_tokens is None:
                tokens = samples * shape.sample_tokens
            says = f"samples, tokens, exhausted of {'node' if is_node else 'source'} {own}, as that says itself"
            counted = child.samples, child.tokens, child.exhausted
            _expect(f"nodes.{number}.{i}", counted, (samples, tokens, exhausted), says)

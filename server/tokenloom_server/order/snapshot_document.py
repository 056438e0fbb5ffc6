"""The fields of a snapshot: sealed, self-sufficient, and plain enough for other tools to read."""

from __future__ import annotations

import bz2
import json
import re
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from tokenloom_proto.seal import SNAPSHOT_FORMAT, SNAPSHOT_VERSION, canonical, unseal

from tokenloom_server.core.state import (
    MAX_COUNTER,
    Cursor,
    EpochCursor,
    FileCursor,
    Lane,
    PackedCursor,
    RowCounts,
    SourceState,
    WindowCursor,
)
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.mixing.policy import MAX_SUM

#: A snapshot of 200 sources has at most 96 KB; larger mixtures are larger, but nothing honest is above this.
MAX_BYTES = 16 * 2**20

#: The fields of a dataset's entry that it has where some of its samples were passed over.
SKIPPED = ("skipped_samples", "skipped_rows", "skipped_tokens", "skipped_padding_tokens")

_Count = Field(ge=0, le=MAX_COUNTER)
_Digest = Field(pattern=r"^[0-9a-f]{32}$")


_Natural = Annotated[int, _Count]
_Flag = Annotated[int, Field(ge=0, le=1)]
#: Samples, tokens, credit, exhausted; and where the node's policy makes the weights itself: weight, total.
_Child = tuple[_Natural, _Natural, int, _Flag]
_WeighedChild = tuple[
    _Natural, _Natural, int, _Flag, Annotated[int, Field(ge=0, le=MAX_SUM)], _Natural
]


class _ChildKind(StrEnum):
    """Which of the two a child is."""

    PLAIN = "plain"
    WEIGHED = "weighed"


def _child_kind(child: object) -> _ChildKind:
    is_weighed = isinstance(child, list | tuple) and len(child) == 6
    return _ChildKind.WEIGHED if is_weighed else _ChildKind.PLAIN


_AnyChild = Annotated[
    Annotated[_Child, Tag(_ChildKind.PLAIN)] | Annotated[_WeighedChild, Tag(_ChildKind.WEIGHED)],
    Discriminator(_child_kind),
]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )


class _Counters(_Strict):
    """What a source, or a lane of it, has given since the run began."""

    samples: int = _Count
    rows: int = _Count
    bad_rows: int = Field(default=0, ge=0, le=MAX_COUNTER)
    filtered_rows: int = Field(default=0, ge=0, le=MAX_COUNTER)
    padding_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    cut_documents: int = Field(default=0, ge=0, le=MAX_COUNTER)
    lost_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)

    @property
    def row_counts(self) -> RowCounts:
        return RowCounts(*(getattr(self, name) for name in RowCounts._fields))

    @property
    def cursor(self) -> Cursor | None:
        """Where it stands; None at the beginning."""
        return None


class _RowPosition(_Strict):
    """Which row is next, and what it has given: tokens, or with best fit samples of the rows packed from it on."""

    epoch: int = _Count
    row_token_offset: int = Field(default=0, ge=0, le=MAX_COUNTER)
    packed_samples: int = Field(default=0, ge=0, le=MAX_COUNTER)

    @model_validator(mode="after")
    def _counts_one_of_both(self) -> Self:
        if self.row_token_offset and self.packed_samples:
            raise ValueError(
                f"packed_samples is {self.packed_samples} beside a row_token_offset of {self.row_token_offset}: rows "
                "that are packed together have none"
            )
        return self

    def _cursor_from(self, row: FileCursor | WindowCursor) -> Cursor:
        if self.packed_samples:
            return PackedCursor(row, self.packed_samples)
        return replace(row, tokens=self.row_token_offset)


class _FilePosition(_RowPosition):
    shard_index: int = _Count
    row_offset: int = _Count

    @property
    def cursor(self) -> Cursor:
        return self._cursor_from(FileCursor(self.epoch, self.shard_index, self.row_offset))


class _WindowPosition(_RowPosition):
    window: int = _Count
    window_row: int = _Count

    @property
    def cursor(self) -> Cursor:
        return self._cursor_from(WindowCursor(self.epoch, self.window, self.window_row))


class _EpochPosition(_Strict):
    epoch: int = _Count
    epoch_rows: int = _Count

    @property
    def cursor(self) -> Cursor:
        return EpochCursor(self.epoch, self.epoch_rows)


class _FileLane(_FilePosition, _Counters):
    pass


class _WindowLane(_WindowPosition, _Counters):
    pass


class _Place(StrEnum):
    """Where a source or a lane stands, which decides the fields that its entry has."""

    FILE = "in a file"
    WINDOW = "in a window"
    EPOCH = "in an epoch"
    BEGINNING = "at its beginning"
    PRESERVED = "preserved"


def _place(entry: object) -> _Place:
    fields = entry.keys() if isinstance(entry, dict) else ()
    if "unknown" in fields:
        return _Place.PRESERVED
    if "epoch_rows" in fields:
        return _Place.EPOCH
    if "window" in fields or "window_row" in fields:
        return _Place.WINDOW
    if {"shard", "shard_index", "row_offset"}.intersection(fields):
        return _Place.FILE
    return _Place.BEGINNING


_AnyLane = Annotated[
    Annotated[_FileLane, Tag(_Place.FILE)]
    | Annotated[_WindowLane, Tag(_Place.WINDOW)]
    | Annotated[_Counters, Tag(_Place.BEGINNING)],
    Discriminator(_place),
]


class KnownDataset(_Counters):
    """A source of the run. ``token_offset`` is its total."""

    id: int = _Count
    spec: str
    alias: str | None = None
    shuffle: Literal["none", "shards", "rows"] = "none"
    token_offset: int = _Count
    dropped_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    exhausted: bool = False
    skipped_samples: int = Field(default=0, ge=0, le=MAX_COUNTER)
    skipped_rows: int = Field(default=0, ge=0, le=MAX_COUNTER)
    skipped_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    skipped_padding_tokens: int = Field(default=0, ge=0, le=MAX_COUNTER)
    lanes: list[_AnyLane] = Field(default_factory=list)
    #: Hexadecimal: more than readers hold in a number.
    owed: str = Field(default="0", pattern=r"^-?[0-9a-f]{1,24}$")

    @property
    def is_packed(self) -> bool:
        """Whether it stands among rows that are packed together, or a lane of it does."""
        return any(isinstance(each.cursor, PackedCursor) for each in (self, *self.lanes))

    @property
    def state(self) -> SourceState:
        return SourceState(
            cursor=self.cursor,
            samples=self.samples,
            rows=self.rows,
            tokens=self.token_offset,
            dropped_tokens=self.dropped_tokens,
            exhausted=self.exhausted,
            row_counts=self.row_counts,
            lanes=tuple(lane_of(entry) for entry in self.lanes),
            owed=int(self.owed, 16),
            **{name: getattr(self, name) for name in SKIPPED},
        )


class FileDataset(_FilePosition, KnownDataset):
    """A source that stands in a file. ``row_offset`` counts within the shard."""

    shard: str


class _WindowDataset(_WindowPosition, KnownDataset):
    """A source of shuffled rows, which stands in a window and in no file."""


class _EpochDataset(_EpochPosition, KnownDataset):
    """A source of batches of rows, which stands in an epoch."""


class _Imported(_Strict):
    sample_index: int = _Count
    digest: str = _Digest


class PreservedDataset(_Strict):
    """A source of an older data loader's checkpoint that no mixture of the run has, as that loader wrote it."""

    model_config = ConfigDict(extra="allow")

    spec: str
    unknown: Literal[True]


_AnyDataset = Annotated[
    Annotated[FileDataset, Tag(_Place.FILE)]
    | Annotated[_WindowDataset, Tag(_Place.WINDOW)]
    | Annotated[_EpochDataset, Tag(_Place.EPOCH)]
    | Annotated[KnownDataset, Tag(_Place.BEGINNING)]
    | Annotated[PreservedDataset, Tag(_Place.PRESERVED)],
    Discriminator(_place),
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


class ResumeStateDocument(_Strict):
    version: Literal[2]
    sample_index: int = _Count
    digest: str = _Digest
    total_tokens: int = _Count
    datasets: list[_AnyDataset]
    imported: _Imported | None = None
    clock_offset: int = Field(default=0, ge=-MAX_COUNTER, le=MAX_COUNTER)
    #: By node, as in ``mixture``, by child.
    nodes: list[list[_AnyChild]]
    #: The mixture in force, by node id, for readers without the mixture file.
    mixture: list[_Node]
    #: What was passed over so far: sample index, samples and tokens.
    skips: list[tuple[_Natural, _Natural, _Natural]] = Field(default_factory=list)
    #: What is passed over (``skips``), the revision in force, and all that are to come.
    revisions: list[_Revision] | None = None
    #: Where the run was forked from.
    origin: dict[str, Any] | None = None

    @property
    def all_skips(self) -> Sequence[tuple[int, int]]:
        """(sample index, samples) of all that the run passes over."""
        of_origin: Sequence[tuple[int, int]] = (self.origin or {}).get("skips", ())
        return next(
            (one.content["skips"] for one in self.revisions or () if "skips" in one.content),
            of_origin,
        )


def _unpacked(text: str) -> Any:
    try:
        return json.loads(bz2.BZ2Decompressor().decompress(b64decode(text), MAX_BYTES))
    except (TypeError, OSError, RecursionError) as error:
        raise ValueError(f"expected JSON, compressed by bzip2, in base 64, but {error}") from None


class SnapshotDocument(_Strict):
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
    #: What has this digest (``config``), and what is ``beside`` the order.
    config: Annotated[dict[str, dict[str, Any]], BeforeValidator(_unpacked)] = Field(
        default_factory=dict
    )
    manifest_digest: str | None = None
    tokenizer: dict[str, str] | None = None
    #: Of what the engine gave when the run began; None for bytes, and without text.
    engine_ids: str | None = None
    resume_state: ResumeStateDocument | None = None
    #: By spec, what each source gave up to the sample index: samples, tokens, real_tokens.
    counts: dict[str, dict[str, _Natural]] | None = None
    real_tokens: int | None = None


def read_document(text: str | bytes) -> SnapshotDocument:
    """Raises ``SnapshotInvalid`` naming the field."""
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
            f"the snapshot has format version {version!r}, this release has {SNAPSHOT_VERSION}: restore it with the "
            "Tokenloom release that wrote it"
        )
    try:
        # As JSON, where a list is a tuple, and nothing else is converted.
        return SnapshotDocument.model_validate_json(canonical(document))
    except ValidationError as error:
        raise SnapshotInvalid(explain(error)) from None


def read_resume_state(text: str) -> ResumeStateDocument:
    """Raises ``SnapshotInvalid`` naming the field."""
    try:
        return ResumeStateDocument.model_validate_json(text)
    except ValidationError as error:
        raise SnapshotInvalid(explain(error)) from None


def lane_of(entry: _Counters) -> Lane:
    return Lane(entry.cursor, entry.samples, entry.rows, entry.row_counts)


#: Faults of what is sealed, and so was written as it is.
_OF_ANOTHER_RELEASE = ("missing", "literal_error", "extra_forbidden")


def explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    # The tags of unions are pydantic's own; the document has no such level.
    parts = (str(part) for part in fault["loc"] if part not in (*_ChildKind, *_Place))
    field = re.sub(r"\.(?=\.)", "", ".".join(parts))
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "union_tag_invalid":
        message = f"it stands {fault['ctx']['tag']}, as no lane does"
    remedy = (
        ": restore it with the Tokenloom release that wrote it"
        if fault["type"] in _OF_ANOTHER_RELEASE
        else ""
    )
    return f"{field or 'the snapshot'}: {message}; found {str(fault['input'])[:80]!r}{remedy}"

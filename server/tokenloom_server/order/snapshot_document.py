"""The fields of a snapshot: sealed, self-sufficient, and plain enough for other tools to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from tokenloom_proto.seal import canonical, unseal

from tokenloom_server.core.state import (
    MAX_COUNTER,
    Cursor,
    Lane,
    RowCounts,
)
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.mixing.weights import MAX_SUM

FORMAT = "tokenloom/snapshot"
VERSION = 1

#: A snapshot of 200 sources has at most 64 KB; larger mixtures are larger, but nothing honest is above this.
MAX_BYTES = 16 * 2**20

#: Of a dataset's entry, where a restore jumped over some of its samples.
SKIPPED = ("skipped_samples", "skipped_rows", "skipped_tokens")

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


class Dataset(_Strict):
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


class InFiles(Dataset):
    """One that is read file by file."""

    shuffle: Literal["none", "shards"] = "none"
    shard: str
    shard_index: int = _Count
    row_offset: int = _Count

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.shard_index, self.row_offset, self.offset)


class InWindows(Dataset):
    """One of shuffled rows: where it stands is no place of a file."""

    shuffle: Literal["rows"]
    window: int = _Count
    window_row: int = _Count

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.window, self.window_row, self.offset)


KnownDataset = InFiles | InWindows


class _Imported(_Strict):
    sample_index: int = _Count
    digest: str = _Digest


class PreservedDataset(_Strict):
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
    Annotated[InFiles, Tag(_DATASETS[0])]
    | Annotated[InWindows, Tag(_DATASETS[1])]
    | Annotated[PreservedDataset, Tag(_DATASETS[2])],
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


class ResumeStateDocument(_Strict):
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
    manifest_digest: str | None = None
    tokenizer: dict[str, str] | None = None
    resume_state: ResumeStateDocument | None = None


def read_document(text: str | bytes) -> SnapshotDocument:
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
        return SnapshotDocument.model_validate_json(canonical(document))
    except ValidationError as error:
        raise SnapshotInvalid(explain(error)) from None


def lane_of(entry: Sequence[int]) -> Lane:
    return Lane(Cursor(*entry[:4]), entry[4], entry[5], RowCounts(*entry[6:]))


def explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    # The tags of unions are pydantic's own; the document has no such level.
    parts = (str(part) for part in fault["loc"] if part not in (*_KINDS, *_DATASETS))
    field = re.sub(r"\.(?=\.)", "", ".".join(parts))
    return f"{field or 'the snapshot'}: {fault['msg']}; found {str(fault['input'])[:80]!r}"

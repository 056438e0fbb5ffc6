"""What another data loader's checkpoint says of the data, read and checked: plain JSON without a seal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tokenloom_proto.resume import CLOCK_KEYS, older_payload, unwrapped
from tokenloom_proto.seal import CHECKSUM

from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.order.nested_state import as_resume_state, is_nested
from tokenloom_server.order.snapshot_document import MAX_BYTES

_Count = Annotated[int, Field(ge=0, le=MAX_COUNTER)]
_RowOffsetOf = Literal["spec", "shard"]

#: An entry that has all of one of these is Tokenloom's own, or was made from one.
_OUR_FIELDS = ({"row_token_offset"}, {"packed_samples"}, {"shard_index", "samples", "rows"})
#: One that has one of these is Tokenloom's own, and stands in no file.
_DRAWN_FIELDS = frozenset(("window", "epoch_rows"))


class Entry(BaseModel):
    """One source of an older payload, with whatever else that tool wrote of it."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="allow", allow_inf_nan=False, defer_build=True
    )

    spec: Annotated[str, Field(min_length=1)]
    shard: Annotated[str, Field(min_length=1)] | None = None
    row_offset: _Count
    row_offset_of: _RowOffsetOf | None = None
    """What ``row_offset`` counts the rows of: the whole spec, epoch after epoch unless there is an ``epoch``, or the
    shard. None where nobody says it."""
    token_offset: _Count | None = None
    epoch: _Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_no_row(cls, fields: Any) -> Any:
        """Tokenloom's own names no row at a source's beginning, nor where that is read in a drawn order."""
        if isinstance(fields, dict) and (
            fields.get("samples") == fields.get("rows") == 0 or not _DRAWN_FIELDS.isdisjoint(fields)
        ):
            return {"row_offset": 0, **fields}
        return fields

    @property
    def was_preserved(self) -> bool:
        """Whether the run that it is of had it in no mixture: what was read of it is no part of that run's samples."""
        return (self.model_extra or {}).get("unknown") is True

    @property
    def counted_tokens(self) -> int:
        """The tokens that are a part of the run's samples."""
        return 0 if self.was_preserved else self.token_offset or 0

    @property
    def reading(self) -> _RowOffsetOf | None:
        """What ``row_offset`` is known to count: in Tokenloom's own the rows of the shard, else what is said of it."""
        fields = {*(self.model_extra or ())}
        return "shard" if any(ours <= fields for ours in _OUR_FIELDS) else self.row_offset_of

    @property
    def was_drawn(self) -> bool:
        """Whether the source was shuffled or read in lanes, so that it does not stand in file order."""
        fields = self.model_extra or {}
        is_drawn = fields.get("shuffle", "none") not in ("none", False, None) or bool(
            fields.get("lanes")
        )
        return is_drawn or not _DRAWN_FIELDS.isdisjoint(fields)


class _ResumeState(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="allow", allow_inf_nan=False, defer_build=True
    )

    datasets: Annotated[list[Entry], Field(min_length=1)]
    row_offset_of: _RowOffsetOf | None = None
    """Of the entries that do not say it themselves."""

    def entries(self) -> tuple[Entry, ...]:
        """The entries, with what is said beside them."""
        said = {"row_offset_of": self.row_offset_of} if self.row_offset_of else {}
        return tuple(
            entry if entry.row_offset_of else entry.model_copy(update=said)
            for entry in self.datasets
        )


@dataclass(frozen=True, slots=True)
class Payload:
    """What an older checkpoint says: ``datasets`` as they were written, the state of ``nested`` ones, which only a
    mixture gives their specs, or a ``sample_index`` alone; and what its token clock can be read from, None where it
    does not say."""

    datasets: tuple[Entry, ...]
    sample_index: int | None
    total_tokens: int | None
    sample_tokens: int | None
    nested: dict[str, Any] | None = None

    def clock(self) -> tuple[int | None, str]:
        """The total tokens of the job that wrote it, None where they are not known; and what says so."""
        offsets = [entry.token_offset for entry in self.datasets if entry.token_offset is not None]
        if self.total_tokens is not None:
            return self.total_tokens, "as the older checkpoint says"
        if offsets and len(offsets) == len(self.datasets):
            return sum(offsets), "the sum of the older checkpoint's token_offset"
        if self.sample_index is not None and self.sample_tokens is not None:
            return (
                self.sample_index * self.sample_tokens,
                "the older checkpoint's sample_index × context_length",
            )
        return (
            None,
            "those of the samples; where its clock was another, write total_tokens into the checkpoint's copy",
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
    document = unwrapped(document)
    document |= older_payload(document)
    resume = document.get("resume_state")
    nested = document if is_nested(document) else None
    if resume is None and "sample_index" not in document and nested is None:
        return None
    if resume is not None and not isinstance(resume, dict):
        raise SnapshotInvalid(
            f"resume_state: expected a mapping with datasets, found {type(resume).__name__}"
        )
    fields = {
        **(resume or {}),
        **{name: value for name, value in document.items() if value is not None},
    }
    sample_index, total_tokens, *lengths = (
        _number(fields, name) for name in ("sample_index", *CLOCK_KEYS)
    )
    clock = sample_index, total_tokens, next(filter(None, lengths), None)
    if resume is not None and "datasets" in resume:
        return Payload(entries_of(resume), *clock)
    if nested is not None:
        return Payload((), as_resume_state(nested, None)["sample_index"], *clock[1:], nested)
    if sample_index is None:
        raise SnapshotInvalid(
            "sample_index: found nothing; expected that, or resume_state.datasets"
        )
    return Payload((), *clock)


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    number = fields.get(name)
    if number is not None and (type(number) is not int or not 0 <= number <= MAX_COUNTER):
        raise SnapshotInvalid(
            f"{name}: found {_short(number)}; expected an integer from 0 to 2^53 − 1"
        )
    return number


def entries_of(resume: dict[str, Any]) -> tuple[Entry, ...]:
    """The entries of a ``resume_state``. Raises ``SnapshotInvalid`` naming spec and field."""
    try:
        return _ResumeState.model_validate(resume).entries()
    except ValidationError as error:
        raise SnapshotInvalid(_explain(error, resume)) from None


def normalised(spec: str, run: RunConfig, base_dir: Path) -> str:
    """A spec as the run has it, also where it names the same files by another path."""
    try:
        parsed = run.catalog.sources.spec(spec)
    except ConfigError:
        return spec  # of a kind that this release does not read: no source of any mixture has it
    text, files = str(parsed), _files(parsed, base_dir)
    same = [known.source for known in run.sources if _files(known.spec, base_dir) == files]
    return text if text in same else next(iter(same), text)


def _files(spec: Spec, base_dir: Path) -> tuple[str, str, str]:
    location = spec.location if spec.is_remote else normpath(base_dir / spec.location)
    return spec.scheme.name, location, spec.column


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

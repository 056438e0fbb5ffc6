"""What another data loader's checkpoint says of the data, read and checked: plain JSON without a seal.

One kind is the state of nested interleaved datasets, as other training stacks save it. A level says ``child_states``,
``examples_per_dataset`` and ``datasets_exhausted`` of its datasets; each of these may be missing. A child state is a
level of its own, the counts of one dataset (``input_count``: rows read, ``output_count``: examples made of them,
``original_length``: rows in all), or nothing. No level names its data: a mixture file does, whose nodes and sources
stand as the levels and datasets do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from os.path import normpath
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tokenloom_proto.resume import BY_DATASET, CLOCK_KEYS, NESTED_KEYS, older_payload, unwrapped
from tokenloom_proto.seal import CHECKSUM

from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.order.snapshot import MAX_BYTES

#: Where a dataset has one of these, the rows that were read of it are not the first ones of its files.
_ELSEWHERE = ("shuffle_seed", "shuffle_buffer_size", "shard_config", "split_start_idx")
#: No loader nests deeper.
_MOST_LEVELS = 32

#: Examples that a dataset gave, and that it will have given at its end; None for what is not known.
_Counts = tuple[int | None, int | None]


def is_nested(state: Any) -> bool:
    """Whether this is the state of a level: it has at least two of the keys."""
    return isinstance(state, Mapping) and len(state.keys() & set(NESTED_KEYS)) > 1


def as_resume_state(state: Any, run: RunConfig | None) -> dict[str, Any]:
    """The ``resume_state`` that says the same, in the mixture's order: ``datasets`` with the rows read of each, and
    ``nodes``, parents first, with counters of examples; None stands for what is not known. Where a loader counts no
    rows, its examples stand for them. Without a run specs are places in the state, and the ``mixture`` is its own tree.

    Raises ``SnapshotInvalid`` where the mixture has another shape, or the state is deeper than any loader nests.
    """
    datasets: list[dict[str, Any]] = []
    nodes: list[list[list[Any]]] = []
    tree: list[dict[str, Any]] = []

    def visit(
        own: Any, config: NodeConfig | SourceConfig | None, path: str, given: Any, out: Any
    ) -> _Counts:
        fields = own if isinstance(own, Mapping) else {}
        below = (
            list(zip_longest(*(listed(fields.get(key)) for key in BY_DATASET)))
            if is_nested(fields)
            else []
        )
        children = config.children if isinstance(config, NodeConfig) else []
        if path.count("child_states") > _MOST_LEVELS or (
            config is not None and len(children) != len(below)
        ):
            raise SnapshotInvalid(
                f"{path or 'the state'}: found {len(below)} datasets within, but the mixture file has {len(children)} "
                "children there: give the one whose nodes and sources stand as the old loader's datasets did"
            )
        made = _count(fields.get("output_count"))
        if not below:
            examples = _count(given, made)
            rows, length = (
                _count(fields.get("input_count"), examples),
                _count(fields.get("original_length")),
            )
            total = _count(fields.get("cached_exact_length"))
            if total is None and length is not None:
                total = length * made // rows if made and rows else length
            spec = config.source if isinstance(config, SourceConfig) else path
            counts = {
                "row_offset": rows,
                "rows": rows,
                "samples": examples,
                "exhausted": out is True,
            }
            datasets.append({**fields, **counts, "id": len(datasets), "spec": spec, "place": path})
            return examples, total
        policy, numbers = (
            "weighted" if listed(fields.get("probabilities")) else None,
            list[list[Any]](),
        )
        tree.append({"id": len(tree), "alias": path, "policy": policy, "children": numbers})
        nodes.append(counted := [])
        for i, (child, examples, ended, share) in enumerate(below):
            numbers.append(
                [2 * len(nodes) + 1 if is_nested(child) else 2 * len(datasets), share, "live"]
            )
            child_path = f"{path}.child_states.{i}".lstrip(".")
            gave, total = visit(
                child, children[i] if children else None, child_path, examples, ended
            )
            counted.append([gave, None, None, ended is True, None, total])
        gave, total = (_sum(row[place] for row in counted) for place in (0, -1))
        return _count(given, fields.get("current_example_count"), gave), total

    examples, _ = visit(state, run.mixture if run is not None else None, "", None, False)
    return {
        "sample_index": examples,
        "datasets": datasets,
        "nodes": nodes,
        "mixture": tree if run is None else [],
    }


def read_entries(
    state: Mapping[str, Any], run: RunConfig, example_tokens: int | None
) -> list[dict[str, Any]]:
    """The ``datasets`` of ``as_resume_state`` as those of an older payload, for a run. Their tokens are those of their
    examples, where ``example_tokens`` says how many one has.

    Raises ``SnapshotInvalid`` where a dataset does not say how many rows were read of it, or these were not the first
    ones of its files.
    """
    entries = []
    for own in as_resume_state(state, run)["datasets"]:
        rows, samples, epoch = own["row_offset"], own["samples"], _count(own.get("epoch")) or None
        drawn = next((key for key in _ELSEWHERE if own.get(key) is not None), None)
        if rows is None or (rows and drawn):
            actual = (
                "nothing"
                if rows is None
                else f"{rows} that are not the first ones of its files: {drawn} is set"
            )
            raise SnapshotInvalid(
                f"{own['place']} (spec {own['spec']!r}): input_count: expected how many rows were read from its "
                f"beginning on, found {actual}; write that into the checkpoint's copy, or 0 to read the source anew"
            )
        tokens = (
            samples * example_tokens if example_tokens is not None and samples is not None else None
        )
        entries.append(
            {"spec": own["spec"], "row_offset": rows, "token_offset": tokens, "epoch": epoch}
        )
    return entries


def _count(*values: Any) -> int | None:
    """The first of them that is one."""
    return next(
        (value for value in values if type(value) is int and 0 <= value <= MAX_COUNTER), None
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count or 0 for count in known)


def listed(value: Any) -> list[Any]:
    """A list of what a checkpoint has there; empty where that is no list."""
    return list(value) if isinstance(value, list | tuple) else []


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

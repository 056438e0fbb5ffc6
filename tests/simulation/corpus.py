"""Small mixtures whose rows lie in memory, and what their order must be: the reference of all worlds."""

from __future__ import annotations

import bisect
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.row_rules import PLAIN, RowRules
from tokenloom_server.core.state import State
from tokenloom_server.ledger.records import Counters, StoredRevision
from tokenloom_server.order import foreign_checkpoint, foreign_payload
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.pipeline import Pipeline, Switch
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.resources import Readers, RunResources
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.base import Content, Rows, Shard
from tokenloom_server.sources.manifest import Manifest, SourceFiles
from tokenloom_server.workers.cluster.description import rebuild

from tests.support.catalog import CATALOG
from tests.support.digest import digest_after

VOCAB, END_OF_TEXT = 60_000, 59_999
#: Rows of one read.
_ROWS_AT_ONCE = 5
NAMES = ("a", "b", "c", "d")


def spec_of(name: str) -> str:
    return f"arrow:{name}:ids"


def _children(*names: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"source": spec_of(name), "alias": name} | fields for name in names]


#: By name: the mixture file's fields beside run, vocabulary and window.
MIXTURES: dict[str, dict[str, Any]] = {
    "one source": {
        "sequence_length": 4,
        "mixture": {"policy": "least_consumed", "children": _children("a")},
    },
    "drops": {
        "sequence_length": 5,
        "mixture": {"policy": "least_consumed", "children": _children("a", "b", "c")},
    },
    "pads": {
        "sequence_length": 6,
        "last_micro_step": "pad",
        "mixture": {"policy": "weighted", "children": _children("a", "b")},
    },
    "nested, shifted, epochs": {
        "sequence_length": 7,
        "labels": "shifted",
        "seed": 3,
        "mixture": {
            "policy": "least_consumed",
            "children": [
                {"source": spec_of("a"), "weight": 2},
                {"source": spec_of("b"), "epochs": 2.5},
                {"policy": "weighted", "weight": 1.5, "children": _children("c", "d")},
            ],
        },
    },
    "stops, padded": {
        "sequence_length": 4,
        "seed": 11,
        "last_micro_step": "pad",
        "mixture": {
            "policy": "least_consumed",
            "on_exhausted": "stop",
            "children": _children("b", "d", epochs=2),
        },
    },
}


#: Of worlds that go on from an older checkpoint: what the order is follows its token clock.
PHASES = "phases, a budget"
MIXTURES_BY_CLOCK: dict[str, dict[str, Any]] = {
    PHASES: {
        "sequence_length": 4,
        "mixture": {"policy": "least_consumed", "children": _children("a", "b", "c")},
        "phases": [
            {"until_tokens": 150},
            {
                "until_tokens": 450,
                "mixture": {
                    "policy": "weighted",
                    "children": [*_children("a", weight=3), *_children("b", "c")],
                },
            },
        ],
    }
}


@cache
def rows_of(name: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """A source's rows by shard. A token is made of its source and its place, so that no two samples are alike."""
    rng = random.Random(f"rows of {name}")
    shards, token = [], NAMES.index(name) * 10_000
    for _ in range(2):
        rows = []
        for _ in range(rng.randint(12, 24)):
            length = rng.choice([0, 1, 2, 3, 5, 8, 13, 21])
            rows.append(tuple(range(token, token + length)))
            token += length
        shards.append(tuple(rows))
    return tuple(shards)


class MemorySource:
    """Implements ``Source``."""

    content = Content.IDS

    def __init__(self, name: str, shards: tuple[Shard, ...]) -> None:
        self.shards = shards
        self._columns = _columns(name)

    def row_count(self, shard: int) -> int:
        return len(self._columns[shard])

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        return np.array([0, self.row_count(shard)], np.int64)

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        column = self._columns[shard]
        for first in range(row, len(column), _ROWS_AT_ONCE):
            yield Rows(first, column[first : first + _ROWS_AT_ONCE])


@cache
def _columns(name: str) -> tuple[pa.Array, ...]:
    return tuple(pa.array(rows, pa.list_(pa.uint16())) for rows in rows_of(name))


class MemoryResources(RunResources):
    """Those of a run whose rows lie in memory. ``breathe`` is called around whatever the producer does that takes
    time; ``readers``: who reads for it, if anybody."""

    def __init__(
        self, breathe: Callable[[], None] = lambda: None, readers: Readers | None = None
    ) -> None:
        super().__init__(Path(), None)
        self.breathe = breathe
        self.readers = readers

    def open_source(
        self,
        spec: Spec,
        shards: tuple[Shard, ...],
        rules: RowRules = PLAIN,
        end_of_text_id: int | None = None,
    ) -> MemorySource:
        return MemorySource(spec.location, shards)


class MemoryFactory(PipelineFactory):
    """Makes pipelines that breathe."""

    resources: MemoryResources

    def breathing(
        self, breathe: Callable[[], None], readers: Readers | None = None
    ) -> MemoryFactory:
        """The same for a server of its own."""
        return MemoryFactory(self.record, MemoryResources(breathe, readers))

    def pipeline(
        self, state: State, *, ahead: bool = False, switches: Sequence[Switch] = ()
    ) -> Pipeline:
        pipeline = super().pipeline(state, ahead=ahead, switches=switches)
        if ahead:
            fill, breathe = pipeline.fill, self.resources.breathe

            def breathing(group: StepGroup, steps: int) -> None:
                breathe()
                fill(group, steps)
                breathe()

            pipeline.fill = breathing  # type: ignore[method-assign]
        return pipeline


def rebuilt(description: str) -> MemoryFactory:
    """The order as a reader has it."""
    return MemoryFactory(rebuild(description).record, MemoryResources())


def order_of(mixture: str, window_micro_steps: int) -> MemoryFactory:
    """A new order over the mixture of that name."""
    document = {
        "run": "world",
        "vocab_size": VOCAB,
        "end_of_text_id": END_OF_TEXT,
        "window_micro_steps": window_micro_steps,
    }
    parsed = config.parse(
        document | (MIXTURES | MIXTURES_BY_CLOCK)[mixture], where=mixture, catalog=CATALOG
    )
    files = tuple(
        SourceFiles(
            source.source,
            tuple(
                Shard(f"{source.spec.location}-{shard}", sum(map(len, rows)), f"{shard}")
                for shard, rows in enumerate(rows_of(source.spec.location))
            ),
        )
        for source in parsed.sources
    )
    record = RunRecord(
        config=parsed, manifest=Manifest(files), tokenizer=None, engine=None, has_loss_mask=False
    )
    return MemoryFactory(record, MemoryResources())


@dataclass(frozen=True, slots=True)
class Sample:
    source: int
    ids: bytes


class Reference:
    """What a world must deliver and count under the revisions that its ledger has.

    Which source stands where is asked of one pipeline that nothing disturbed. What a source's samples hold, the
    counters and the digests are worked out here, from the rows alone.
    """

    def __init__(
        self, mixture: str, revisions: Sequence[StoredRevision] = (), older: str = ""
    ) -> None:
        """``older``: the checkpoint of an older data loader that the order begins from, if any."""
        order = order_of(mixture, 2)
        self.revisions = tuple(revisions)
        #: The same without what is passed over, which is what the newest that tells of it says.
        self.changes = [revision for revision in revisions if skips_of(revision) is None]
        skips = self.skips = next(
            (skips for each in reversed(revisions) if (skips := skips_of(each)) is not None), {}
        )
        self.older = older
        self.config = order.config
        self.specs = order.record.specs
        self.length = order.config.sequence_length
        document = json.loads(older or "{}")
        entries = {
            entry["spec"]: entry for entry in document.get("resume_state", {}).get("datasets", ())
        }
        passed, before = zip(
            *(_passed(spec, entries.get(spec), self.length) for spec in self.specs), strict=True
        )
        #: Where its own samples begin, and where a launch that brings the older checkpoint does.
        first = sum(before)
        self.begin = first or document.get("sample_index", 0)
        self._clock_offset = document["total_tokens"] - self.begin * self.length if older else 0
        # The plain order has what is passed over, so that later changes lie so much further in it.
        plain = [
            replace(
                change,
                sample_index=change.sample_index + _passed_before(change.sample_index, skips),
            )
            for change in self.changes
        ]
        timeline = Timeline(order, plain).with_clock(self._clock_offset)
        picks, digest = _picks(timeline, _start(timeline, older))
        streams = [
            _stream(source.spec.location, source.epochs, rows)
            for source, rows in zip(order.config.sources, passed, strict=True)
        ]
        ends = [stream.row_ends for stream in streams]
        self._passed, self._before = passed, before
        given, skipped = [0] * len(streams), [Counters(samples=0, rows=0, tokens=0)] * len(streams)
        # Nothing before the first is of this order.
        self.samples = [Sample(-1, b"")] * first
        self.digests = [*([""] * first), f"{digest:032x}"]
        self.counters = [*([{}] * first), self._count(given, ends, skipped)]
        #: Of each sample, its place in the plain order; and the samples to pass over before the next one.
        self.places = [-1] * first
        left = skips.get(first, 0)
        for place, source in enumerate(picks):
            at = given[source] * self.length
            if left:
                given[source] += 1
                rows = _rows_taken(ends[source], at + self.length) - _rows_taken(ends[source], at)
                was = skipped[source]
                skipped[source] = Counters(
                    samples=was.samples + 1, rows=was.rows + rows, tokens=was.tokens + self.length
                )
                left -= 1
                continue
            ids = streams[source].tokens[at : at + order.form.width].astype("<u2").tobytes()
            given[source] += 1
            digest = digest_after(digest, source, ids)
            self.samples.append(Sample(source, ids))
            self.digests.append(f"{digest:032x}")
            self.counters.append(self._count(given, ends, skipped))
            self.places.append(place)
            left = skips.get(len(self.samples), 0)

    def __len__(self) -> int:
        return len(self.samples)

    def tokens_at(self, index: int) -> int:
        """The run's total tokens before a sample."""
        return index * self.length + self._clock_offset

    def in_force(self, index: int) -> dict[str, Any] | None:
        """The newest revision that holds at a sample index, as a state names it; None where there is none."""
        found = [revision for revision in self.changes if revision.sample_index <= index]
        if not found:
            return None
        return {"content": json.loads(found[-1].content), "sample_index": found[-1].sample_index}

    def _count(
        self, given: list[int], ends: list[list[int]], skipped: list[Counters]
    ) -> dict[str, Counters]:
        return {
            spec: Counters(
                samples=before + samples - out.samples,
                rows=passed + _rows_taken(row_ends, samples * self.length) - out.rows,
                tokens=(before + samples) * self.length - out.tokens,
            )
            for spec, samples, row_ends, passed, before, out in zip(
                self.specs, given, ends, self._passed, self._before, skipped, strict=True
            )
        }


def skips_of(revision: StoredRevision) -> dict[int, int] | None:
    """How many samples are passed over, by sample index, as a revision says; None where it is no skip."""
    content = json.loads(revision.content)
    return dict(content["skips"]) if "skips" in content else None


def _passed_before(index: int, skips: Mapping[int, int]) -> int:
    return sum(samples for skip, samples in skips.items() if skip < index)


@cache
def reference(
    mixture: str, revisions: tuple[StoredRevision, ...] = (), older: str = ""
) -> Reference:
    return Reference(mixture, revisions, older)


def older_checkpoint(mixture: str, rng: random.Random) -> str:
    """What an older data loader may have saved: rows of some sources with a clock of its own, or only how many samples
    it had, by such a clock."""
    order = order_of(mixture, 2)
    length = order.config.sequence_length
    entries = []
    for spec in rng.sample(order.record.specs, rng.randint(1, len(order.record.specs))):
        shards, shard = rows_of(spec.split(":")[1]), rng.randint(0, 1)
        entry = {"spec": spec, "shard": f"{spec.split(':')[1]}-{shard}", "row_offset_of": "shard"}
        entry["row_offset"] = rng.randint(0, len(shards[shard]) // 2)
        entries.append(entry | ({"token_offset": rng.randint(0, 40)} if rng.random() < 0.8 else {}))
    if rng.random() < 0.4:
        entries.append(
            {"spec": "arrow:gone:ids", "row_offset": 7, "token_offset": rng.randint(0, 500)}
        )
    document: dict[str, Any] = {"resume_state": {"datasets": entries}}
    samples = sum(
        entry.get("token_offset", 0) // length
        for entry in entries
        if entry["spec"] in order.record.specs
    )
    if rng.random() < 0.4:
        samples = rng.randint(1, 8)
        document = {"sample_index": samples}
    # Never the clock that counts the samples here: by that a state of it is told from others.
    less = samples * length if rng.random() < 0.3 else 0
    clock_offset = -rng.randint(1, less) if less else rng.randint(1, 300)
    return json.dumps(document | {"total_tokens": samples * length + clock_offset})


def _passed(spec: str, entry: Mapping[str, Any] | None, length: int) -> tuple[int, int]:
    """Rows of a source that an older checkpoint is beyond, and the samples that its counters begin with."""
    if entry is None:
        return 0, 0
    name, shard = spec.split(":")[1], int(entry["shard"].rpartition("-")[2])
    rows = sum(len(rows) for rows in rows_of(name)[:shard]) + entry["row_offset"]
    return rows, entry.get("token_offset", 0) // length


def _start(timeline: Timeline, older: str) -> State:
    """The state at which the order begins."""
    payload = foreign_payload.read(older) if older else None
    point = foreign_checkpoint.resume_point(payload, timeline) if payload is not None else None
    return timeline.initial() if point is None or point.base is None else point.base


@dataclass(frozen=True, slots=True)
class _Stream:
    tokens: Any
    row_ends: list[int]


def _stream(name: str, epochs: float, passed: int) -> _Stream:
    """A source's documents, joined, and where each row ends; without so many rows at its beginning."""
    rows = [row for shard in rows_of(name) for row in shard]
    whole = math.floor(epochs)
    rows = (rows * whole + rows[: math.ceil((epochs - whole) * len(rows))])[passed:]
    documents = [[*row, END_OF_TEXT] if row else [] for row in rows]
    tokens = np.array([token for document in documents for token in document], np.int64)
    return _Stream(tokens, list(accumulate(map(len, documents))))


def _rows_taken(row_ends: list[int], tokens: int) -> int:
    """Rows that were taken to their end, and those without tokens before the one that was taken from last."""
    if not tokens:
        return 0
    last = bisect.bisect_left(row_ends, tokens)
    return last + (row_ends[last] == tokens)


def _picks(timeline: Timeline, start: State) -> tuple[list[int], int]:
    """The source of every sample from a state on, from an undisturbed pipeline; and the digest there."""
    pipeline = timeline.pipeline(start)
    plan = BatchPlan(
        start_index=start.sample_index, world_size=1, batch_size=1, group_micro_steps=4096
    )
    group = pipeline.begin_group(plan)
    pipeline.fill(group, 4096)
    assert pipeline.ended is not None
    picks: list[int] = group.source_ids[0, : len(group.marks), 0].tolist()
    return picks, start.digest

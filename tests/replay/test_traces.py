"""Traces of a run without a socket: each sample's documents, put together from the corpus alone, are the sample."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, flat, mixture, write_corpus
from support.served import serving
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.core.state import DIGEST_MODULUS, DIGEST_MULTIPLIER, digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    LimitExceeded,
    NotFound,
    OrderMismatch,
    ServerStopping,
    SnapshotInvalid,
    TooManyPeeks,
)
from tokenloom_server.ledger.commands import Pin, ThinJournal
from tokenloom_server.order.replay import Replay
from tokenloom_server.replay.documents import by_source, explain
from tokenloom_server.replay.past import MAX_PEEKS
from tokenloom_server.replay.peek import Peek
from tokenloom_server.reports.trace import TracedSample
from tokenloom_server.run.delivery import Delivery, EndOfData, Waiting
from tokenloom_server.run.join_call import JoinCall

PATIENCE_S = 20.0
END = 256
#: Where the rows of ``ROWS`` lie, by spec and shard.
PATHS = {
    CODE: ["data/code-0.parquet", "data/code-1.parquet"],
    DOCS: ["data/docs.jsonl"],
    PROSE: ["data/prose/0.txt", "data/prose/1.txt"],
    WIKI: ["data/wiki/data-00000-of-00001.arrow"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("traced"))


def row_ids(spec: str, shard: int, row: int) -> list[int]:
    """A row's tokens, from the corpus alone: bytes, or the ids as they are, and an end-of-text id behind any."""
    found = ROWS[spec][shard][row]
    ids = list(found.encode() if isinstance(found, str) else found or ())
    return [*ids, END] if ids else []


def documents_ids(sample: TracedSample) -> list[int]:
    """The tokens that a trace names, taken out of the corpus; checks that it tells the truth about each row."""
    ids: list[int] = []
    for document in sample.documents:
        row = row_ids(sample.spec, document.shard_index, document.row)
        assert document.shard == PATHS[sample.spec][document.shard_index]
        assert document.row_tokens == len(row)
        assert 0 <= document.begin < document.end <= len(row)
        assert document.position == len(ids)
        ids += row[document.begin : document.end]
    return ids


class Rank0:
    """A world of one by itself, in this process."""

    def __init__(self, served: ServedRun, attempt: str, state: bytes = b"", resume: str = "", batch_size: int = 1):
        self.coordinator = served.coordinator
        call = JoinCall(
            rank=0, world_size=1, batch_size=batch_size, attempt=attempt, nonce="n", resume=resume, state=state,
            takeover=True,
        )  # fmt: skip
        self.opening = served.join_handler.join(call).opening
        self.at = self.opening.start_index
        self.session = self.coordinator.attach(self.coordinator.uid, self.opening.generation, 0, "n", self.at, 0)
        self.samples: dict[int, tuple[int, bytes]] = {}
        self.digests: dict[int, str] = {}

    def train(self, to: int) -> Rank0:
        """Takes samples up to an index, or to the end of the data, and has them committed."""
        self.coordinator.progress(self.session, self.at, 10_000)
        while self.at < to:
            found = self.coordinator.next_for(self.session, PATIENCE_S, lambda: False)
            if isinstance(found, EndOfData):
                break
            if isinstance(found, Waiting):
                continue
            assert isinstance(found, Delivery)
            group = found.group
            sources = group.source_ids[0, found.first : found.last].ravel().tolist()
            for i, (source, ids) in enumerate(zip(sources, group.ids(0, found.first, found.last), strict=True)):
                if source >= 0:
                    self.samples[group.step_begin(found.first) + i] = source, ids.tobytes()
            self.at = group.marks[found.last - 1].sample_index
            self.coordinator.progress(self.session, self.at, 10_000)
        self.coordinator.finish(self.session, PATIENCE_S)
        return self


DOCUMENTS = {
    "nested": mixture(),
    "shifted": mixture(labels="shifted"),
    "with begins": mixture(add_bos=True, sequence_length=5),
    "without ends": flat([CODE, WIKI], add_eot=False, sequence_length=2),
    "long": mixture(sequence_length=64),
    "shuffled": mixture(
        mixture={
            "policy": "weighted",
            "children": [
                {"source": CODE, "shuffle": "rows", "shuffle_window_rows": 5, "epochs": 2},
                {"source": PROSE, "shuffle": "shards"},
                {"source": DOCS, "shuffle": "rows"},
            ],
        }
    ),
    "shifted, fractions of epochs": mixture(
        labels="shifted",
        sequence_length=3,
        mixture={
            "policy": "round_robin",
            "children": [{"source": CODE, "epochs": 2.5}, {"source": PROSE, "epochs": 3}, {"source": DOCS}],
        },
    ),
}


@pytest.mark.parametrize("name", ["nested", "shifted", "long", "shuffled", "shifted, fractions of epochs"])
def test_the_documents_of_every_sample_are_the_sample(folder: Path, tmp_path: Path, name: str) -> None:
    with serving(folder, tmp_path, DOCUMENTS[name]) as served:
        order = served.coordinator.order
        rank = Rank0(served, "a").train(10**6)
        digest = 0
        positions: dict[tuple[int, int], int] = {}
        touched = set()
        for index, (source, wire) in sorted(rank.samples.items()):
            ids = memoryview(wire).cast("H").tolist()
            found = served.traces.sample(index, None, index % 7 == 0)
            hashed = xxhash.xxh3_128_intdigest(wire, source)
            digest = (digest * DIGEST_MULTIPLIER + hashed) % DIGEST_MODULUS
            assert (found.sample, found.source_id, found.spec) == (index, source, order.record.specs[source])
            assert (found.generation, found.status, found.micro_step, found.rank, found.place) == (
                1,
                "committed",
                index,
                0,
                0,
            )
            assert (found.hash, found.digest) == (digest_hex(hashed), digest_hex(digest))
            assert documents_ids(found) == ids
            assert found.tokens == order.config.sequence_length
            assert found.source_sample == positions.get((source, -1), 0)
            positions[source, -1] = found.source_sample + 1
            for document in found.documents:
                touched.add((found.spec, document.shard, document.epoch))
            if index % 7:
                assert found.ids is None
                assert {document.text for document in found.documents} == {None}
            else:
                assert found.ids == ids
                texts = "".join(document.text or "" for document in found.documents)
                if found.spec in (DOCS, PROSE):
                    assert texts.replace("<|endoftext|>", "") == bytes(i for i in ids if i != END).decode()
        assert {(DOCS, PATHS[DOCS][0], 0), (CODE, PATHS[CODE][1], 0), (PROSE, PATHS[PROSE][1], 0)} <= touched
        assert max(epoch for _, _, epoch in touched) == (2 if "fractions" in name else 1)


@pytest.mark.parametrize("name", ["with begins", "without ends"])
def test_begin_of_text_ids_belong_to_their_rows(folder: Path, tmp_path: Path, name: str) -> None:
    with serving(folder, tmp_path, DOCUMENTS[name]) as served:
        rank = Rank0(served, "a").train(60)
        rows: dict[tuple[str, str, int], list[int]] = {}
        for index in sorted(rank.samples)[:60]:
            found = served.traces.sample(index, None, True)
            assert found.ids == memoryview(rank.samples[index][1]).cast("H").tolist()
            for document in found.documents:
                row = rows.setdefault((found.spec, document.shard, document.row), [])
                if document.epoch == 0:
                    assert len(row) == document.begin
                    row += found.ids[document.position : document.position + document.end - document.begin]
        assert len(rows) > 5
        for (spec, path, row), ids in rows.items():
            whole = row_ids(spec, PATHS[spec].index(path), row)
            expected = whole[:-1] if "ends" in name else [257, *whole]
            assert ids == expected[: len(ids)]


# Steps and generations


def test_a_step_is_what_each_rank_got_and_the_data_end_within_a_padded_one(folder: Path, tmp_path: Path) -> None:
    document = flat([DOCS, PROSE], last_micro_step="pad", sequence_length=16)
    with serving(folder, tmp_path, document) as served:
        rank = Rank0(served, "a", batch_size=4).train(10**6)
        length = len(rank.samples)
        assert length % 4, "the data shall end within a step"
        for step in range(-(-length // 4)):
            found = served.traces.micro_step(step, None, None, False)
            assert found == served.traces.micro_step(step, 0, None, False)
            assert (found.begin, found.end, found.world_size, found.batch_size) == (
                step * 4, min(step * 4 + 4, length), 1, 4,
            )  # fmt: skip
            (only,) = found.ranks
            assert only.padding == 4 - (found.end - found.begin)
            for place, sample in enumerate(only.samples):
                source, wire = rank.samples[step * 4 + place]
                assert (sample.sample, sample.micro_step, sample.place, sample.source_id) == (
                    step * 4 + place, step, place, source,
                )  # fmt: skip
                assert documents_ids(sample) == memoryview(wire).cast("H").tolist()
        with pytest.raises(BeyondHorizon, match=rf"micro-step {step + 1} of run 'test' was not .* before {length};"):
            served.traces.micro_step(step + 1, None, None, False)
        with pytest.raises(BeyondHorizon, match=rf"sample {length} of run 'test' was not delivered"):
            served.traces.sample(length, None, False)


def test_a_generation_that_was_taken_back_is_still_told(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, mixture()) as served:
        first = Rank0(served, "a").train(50)
        text, _ = served.history.snapshot(20)
        second = Rank0(served, "b", text.encode(), batch_size=2).train(30)
        assert second.opening.parent == 1
        assert {i: second.samples[i] for i in range(20, 30)} == {i: first.samples[i] for i in range(20, 30)}
        told = {
            (19, None): (1, "committed", 19, 0),
            (20, None): (2, "committed", 0, 0),
            (29, None): (2, "committed", 4, 1),
            (29, 2): (2, "committed", 4, 1),
            (19, 2): (1, "committed", 19, 0),
            (19, 1): (1, "committed", 19, 0),
            (20, 1): (1, "rewound", 20, 0),
            (49, 1): (1, "rewound", 49, 0),
        }
        for (index, generation), where in told.items():
            found = served.traces.sample(index, generation, False)
            assert (found.generation, found.status, found.micro_step, found.place) == where
            assert documents_ids(found) == memoryview(first.samples[index][1]).cast("H").tolist()
        rewound = served.traces.micro_step(49, 0, 1, True).ranks[0].samples[0]
        assert rewound == served.traces.sample(49, 1, True)
        # Nothing that lies ahead of the present generation is told of it.
        with pytest.raises(BeyondHorizon, match=r"generation 2, which began at sample 20, has produced those before"):
            served.traces.sample(10**6, None, False)
        with pytest.raises(BeyondHorizon, match=r"sample 1000000 is \d+ samples beyond sample .* goes 65536 further"):
            served.traces.sample(10**6, 1, False)
        with pytest.raises(BeyondHorizon, match=r"micro-step 5000 of generation 1 does not exist: .* the data end at"):
            served.traces.micro_step(5000, None, 1, False)
        with pytest.raises(BeyondHorizon, match=r"sample 5000 does not exist: the data end at sample \d+"):
            served.traces.sample(5000, 1, False)
        with pytest.raises(NotFound, match=r"there is no generation 3; the ledger has 1 to 2"):
            served.traces.sample(0, 3, False)
        with pytest.raises(ConfigError, match=r"rank is 1, but generation 2 has ranks 0 to 0"):
            served.traces.micro_step(0, 1, None, False)


def test_of_a_run_that_nobody_joined_nothing_is_told(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, mixture()) as served:
        with pytest.raises(BeyondHorizon, match="has delivered nothing yet: no trainer has joined it"):
            served.traces.sample(0, None, False)
        with pytest.raises(BeyondHorizon, match="has delivered nothing yet"):
            served.traces.micro_step(0, None, 1, False)


# Bounds


def test_how_far_an_old_generation_came_is_taken_from_its_journal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.replay.past.AHEAD_SAMPLES", 3)
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 4)
    with serving(folder, tmp_path, mixture(window_micro_steps=4)) as served:
        first = Rank0(served, "a")
        for to in range(4, 72, 4):
            first.train(to)
        Rank0(served, "b", resume="fresh").train(4)
        coordinator = served.coordinator
        for _ in range(3):
            coordinator.ledger.execute(ThinJournal(coordinator.uid, coordinator.stream, coordinator.lease.epoch))
        for index in range(64):
            assert served.traces.sample(index, 1, False).digest == first_digest(first, index)
        with pytest.raises(BeyondHorizon):
            served.traces.sample(400, 1, False)


def first_digest(rank: Rank0, index: int) -> str:
    digest = 0
    for at in range(index + 1):
        source, wire = rank.samples[at]
        digest = (digest * DIGEST_MULTIPLIER + xxhash.xxh3_128_intdigest(wire, source)) % DIGEST_MODULUS
    return digest_hex(digest)


def test_a_trace_has_so_many_tokens_and_documents_but_for_one_sample(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder, tmp_path, flat([PROSE], sequence_length=32)) as served:
        Rank0(served, "a", batch_size=4).train(10**6)
        assert len(served.traces.micro_step(1, None, None, False).ranks[0].samples) == 4
        monkeypatch.setattr("tokenloom_server.replay.trace.MAX_DOCUMENTS", 3)
        with pytest.raises(LimitExceeded, match=r"4 samples have more than 3 documents, .* ask for one rank"):
            served.traces.micro_step(1, None, None, False)
        monkeypatch.setattr("tokenloom_server.replay.trace.MAX_TEXT_TOKENS", 100)
        with pytest.raises(LimitExceeded, match="and one trace tells of 100 at most with their text: ask for one rank"):
            served.traces.micro_step(1, None, None, True)
        monkeypatch.setattr("tokenloom_server.replay.trace.MAX_TOKENS", 63)
        with pytest.raises(LimitExceeded, match="4 samples have 128 tokens, and one trace tells of 63 at most"):
            served.traces.micro_step(1, None, None, False)
        assert len(served.traces.sample(4, None, False).documents) > 0


def test_traces_and_peeks_share_their_places(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, mixture()) as served, ExitStack() as places:
        Rank0(served, "a").train(4)
        for _ in range(MAX_PEEKS):
            places.enter_context(served.peeks.open(served.coordinator.uid, 0, 1))
        with pytest.raises(TooManyPeeks):
            served.traces.sample(0, None, False)
        places.close()
        assert served.traces.sample(0, None, False).sample == 0


def test_a_trace_that_takes_too_long_goes_on_when_it_is_asked_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.order.replay.TURN_TOKENS", 40)
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 1000)
    with serving(folder, tmp_path, mixture()) as served:
        rank = Rank0(served, "a").train(61)
        times = iter(range(10_000))
        monkeypatch.setattr("tokenloom_server.replay.trace.time.monotonic", lambda: float(next(times)))
        monkeypatch.setattr("tokenloom_server.replay.trace.MAX_FORWARD_S", 1.5)
        asked = 0
        while True:
            asked += 1
            try:
                found = served.traces.sample(60, None, False)
                break
            except ServerStopping as error:
                assert "ask again" in str(error)
        assert documents_ids(found) == memoryview(rank.samples[60][1]).cast("H").tolist()
        assert asked > 3


def test_rows_that_changed_since_are_not_told_as_if_they_were_the_sample(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    with serving(folder, ledger, flat([PROSE])) as served:
        Rank0(served, "a").train(4)
        order = served.coordinator.order
        group = Replay(order, order.initial()).samples(1, 4)
        path = folder / PATHS[PROSE][0]
        written = path.stat()
        path.write_bytes(path.read_bytes().translate(bytes.maketrans(b"123", b"321")))
        # A change that shows by the time of writing is refused when the file is opened again.
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
        (samples,) = by_source(group)
        with pytest.raises(OrderMismatch, match=r"sample \d of run 'test' has other tokens than its rows"):
            explain(order, group, samples, None, False)


# Revisions


def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a revision may hold soon."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 4)


def change(**fields: Any) -> MixtureChange:
    return MixtureChange.model_validate({"reason": "because"} | fields)


def told_as_received(served: ServedRun, rank: Rank0, indices: Iterable[int], generation: int | None = None) -> None:
    for index in indices:
        found = served.traces.sample(index, generation, False)
        source, wire = rank.samples[index]
        assert (found.source_id, documents_ids(found)) == (source, memoryview(wire).cast("H").tolist()), index


def test_samples_before_and_behind_revisions_are_told_by_the_rows_they_had(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_groups(monkeypatch)
    excluded = tmp_path / "out.jsonl"
    lines = [{"spec": CODE, "shard": PATHS[CODE][0], "row": row} for row in range(5, 14)]
    excluded.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    document = flat([CODE, PROSE, WIKI], window_micro_steps=4, labels="shifted", last_micro_step="pad")
    with serving(folder, tmp_path, document) as served:
        rank = Rank0(served, "a").train(6)
        revisions = [
            change(exclude={"file": str(excluded)}),
            change(set=[{"child": CODE, "weight": 3}], drop=[PROSE]),
            change(add=[{"child": {"source": DOCS, "weight": 2}}]),
        ]
        held = []
        for to, revision in zip((7, 30, 60), revisions, strict=True):
            rank.train(to)
            held.append(served.revision_handler.revise(revision).sample_index)
        assert held == sorted(set(held))
        rank.train(10**6)
        told_as_received(served, rank, sorted(rank.samples))
        rows = {
            (document.shard, document.row)
            for index in range(held[0] + 8, len(rank.samples))
            for document in served.traces.sample(index, None, False).documents
        }
        assert not rows & {(line["shard"], line["row"]) for line in lines}
        # A step that lies on both sides of each.
        late = Rank0(served, "b", resume="fresh", batch_size=7).train(10**6)
        assert late.samples == rank.samples
        for step in range(len(late.samples) // 7):
            found = served.traces.micro_step(step, 0, 2, True)
            assert [sample.sample for sample in found.ranks[0].samples] == list(range(step * 7, step * 7 + 7))
            for sample in found.ranks[0].samples:
                assert sample.ids == memoryview(late.samples[sample.sample][1]).cast("H").tolist()
                assert documents_ids(sample) == sample.ids


def test_a_generation_from_before_a_revision_is_told_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_groups(monkeypatch)
    with serving(folder, tmp_path, flat([CODE, PROSE, WIKI], window_micro_steps=4)) as served:
        first = Rank0(served, "a").train(60)
        text, _ = served.history.snapshot(20)
        second = Rank0(served, "b", text.encode()).train(24)
        index = served.revision_handler.revise(change(drop=[PROSE])).sample_index
        assert 24 < index < 50
        second.train(60)
        assert second.samples[59] != first.samples[59]
        told_as_received(served, second, range(20, 60))
        told_as_received(served, first, range(60), 1)
        told_as_received(served, first, range(20))
        for step in range(60):
            assert (
                served.traces.micro_step(step, 0, 1, True).ranks[0].samples[0].ids
                == memoryview(first.samples[step][1]).cast("H").tolist()
            )


def test_a_peek_ahead_takes_a_revision_that_comes_or_is_told_that_it_came_too_late(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_groups(monkeypatch)
    with (
        serving(folder, tmp_path, flat([CODE, PROSE, WIKI], window_micro_steps=4)) as served,
        ExitStack() as open_peeks,
    ):
        rank = Rank0(served, "a").train(4)
        near, far, resting = (
            open_peeks.enter_context(served.peeks.open(served.coordinator.uid, at, 1)) for at in (5, 70, 70)
        )
        seen = []
        for peek, at in ((near, 5), (far, 70), (resting, 70)):
            peek.progress(at, 1)
            seen.append(_taken(peek, 1))
        monkeypatch.setattr("tokenloom_server.replay.peek.REST_S", 0.0)
        assert isinstance(resting.next(0.01, lambda: False), Waiting)
        assert resting._replay.rests
        index = served.revision_handler.revise(change(drop=[PROSE])).sample_index
        assert 6 < index < 60
        near.progress(6, 100)
        rank.train(10**6)
        shown = seen[0] + _taken(near, 60)
        assert shown == [rank.samples[at][1] for at in range(5, 66)]
        for peek in (far, resting):
            peek.progress(71, 1)
            with pytest.raises(OrderMismatch, match=rf"the mixture was revised at sample {index} while this peek was"):
                _taken(peek, 1)
        with served.peeks.open(served.coordinator.uid, 70, 1) as again:
            again.progress(70, 1)
            assert _taken(again, 1) == [rank.samples[70][1]]


def _taken(peek: Peek, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        made = peek.next(PATIENCE_S, lambda: False)
        assert isinstance(made, Delivery), made
        found += [sample.tobytes() for sample in made.group.ids(0, made.first, made.last)]
    return found[:count]


def test_a_skip_that_was_pinned_before_a_revision_takes_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_groups(monkeypatch)
    with serving(folder, tmp_path, flat([CODE, PROSE, WIKI], window_micro_steps=4)) as served:
        rank = Rank0(served, "a").train(8)
        coordinator = served.coordinator
        text, _ = served.history.snapshot(8)
        coordinator.ledger.execute(
            Pin(coordinator.uid, coordinator.stream, coordinator.lease.epoch, served.past.pin(text, 60))
        )
        index = served.revision_handler.revise(change(drop=[PROSE])).sample_index
        assert index < 60
        behind = Rank0(served, "b")
        assert (behind.opening.start_index, behind.opening.skipped) == (68, 60)
        behind.train(90)
        whole = Rank0(served, "c", resume="fresh").train(90)
        assert {at: whole.samples[at] for at in range(68, 90)} == {at: behind.samples[at] for at in range(68, 90)}
        assert {at: whole.samples[at] for at in range(8)} == {at: rank.samples[at] for at in range(8)}


def test_a_generation_whose_revision_was_dropped_since_is_not_told_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_groups(monkeypatch)
    with serving(folder, tmp_path, flat([CODE, PROSE, WIKI], window_micro_steps=4)) as served:
        first = Rank0(served, "a").train(4)
        text, _ = served.history.snapshot(4)
        index = served.revision_handler.revise(change(drop=[PROSE])).sample_index
        for to in range(8, 60, 4):
            first.train(to)
        told_as_received(served, first, range(56))
        second = Rank0(served, "b", text.encode()).train(5)
        told_as_received(served, first, range(56), 1)
        served.revision_handler.drop(1)
        told_as_received(served, second, range(4, 5))
        for at in (index - 1, index, 50):
            with pytest.raises(SnapshotInvalid, match="a revision was dropped"):
                served.traces.sample(at, 1, False)

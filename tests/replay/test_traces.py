"""Traces of a run without a socket: each sample's documents, put together from the corpus alone, are the sample."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, flat, mixture, numbers, write_corpus
from support.digest import digest_after
from support.features import LATENTS, write_features
from support.features import document as features_document
from support.mixing import node
from support.served import PATIENCE_S, Place, Trainer, never, revise, serving
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core.state import digest_hex
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
from tokenloom_server.ledger.commands import ThinJournal
from tokenloom_server.order.replay import Replay
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.replay.peek import Peek
from tokenloom_server.run.generation import Delivery, Waiting
from tokenloom_server.run.past import MAX_PEEKS
from tokenloom_tools.reports.documents import TracedPart, TracedSample
from tokenloom_tools.trace import Traces, explain

END = 256
#: Where the rows of ``ROWS`` lie, by spec and shard.
PATHS = {
    CODE: ["data/code-0.parquet", "data/code-1.parquet"],
    DOCS: ["data/docs.jsonl"],
    PROSE: ["data/prose/0.txt", "data/prose/1.txt"],
    WIKI: ["data/wiki/data-00000-of-00001.arrow"],
}


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


def traced(served: ServedRun) -> Traces:
    return served.companion(Traces)


def ids_of(wire: bytes) -> list[int]:
    return memoryview(wire).cast("H").tolist()


DOCUMENTS = {
    "nested": mixture(),
    "shifted": mixture(labels="shifted"),
    "long": mixture(sequence_length=64),
    "shuffled": mixture(
        mixture=node(
            "weighted",
            {"source": CODE, "shuffle": "rows", "shuffle_window_rows": 5, "epochs": 2},
            {"source": PROSE, "shuffle": "shards"},
            {"source": DOCS, "shuffle": "rows"},
        )
    ),
    "shifted, fractions of epochs": mixture(
        labels="shifted",
        sequence_length=3,
        mixture=node(
            "round_robin",
            {"source": CODE, "epochs": 2.5},
            {"source": PROSE, "epochs": 3},
            {"source": DOCS},
        ),
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_documents_of_every_sample_are_the_sample(
    folder: Path, tmp_path: Path, name: str
) -> None:
    with serving(folder, tmp_path, DOCUMENTS[name]) as served:
        order = served.coordinator.order
        trainer = Trainer(served, 1, 1).train_to(10**6)
        digest = 0
        given: Counter[int] = Counter()
        touched = set()
        for index, (source, wire) in sorted(trainer.taken().items()):
            digest = digest_after(digest, source, wire)
            given[source] += 1
            # The later samples of a long run are looked at here and there.
            if index > 150 and index % 5:
                continue
            ids = ids_of(wire)
            found = traced(served).sample(index, None, index % 7 == 0)
            assert (found.sample, found.source_id) == (index, source)
            assert (found.spec, found.status) == (order.record.specs[source], "committed")
            assert (found.generation, found.micro_step, found.rank, found.place) == (1, index, 0, 0)
            assert found.hash == digest_hex(xxhash.xxh3_128_intdigest(wire, source))
            assert found.digest == digest_hex(digest)
            assert documents_ids(found) == ids
            assert found.tokens == order.config.sequence_length
            assert found.source_sample == given[source] - 1
            for document in found.documents:
                touched.add((found.spec, document.shard, document.epoch))
            if index % 7:
                assert found.ids is None
                assert {document.text for document in found.documents} == {None}
            else:
                assert found.ids == ids
                texts = "".join(document.text or "" for document in found.documents)
                if found.spec in (DOCS, PROSE):
                    plain = bytes(i for i in ids if i != END).decode()
                    assert texts.replace("<|endoftext|>", "") == plain
        assert {(spec, PATHS[spec][-1], 0) for spec in (DOCS, CODE, PROSE)} <= touched
        assert max(epoch for _, _, epoch in touched) == (2 if "fractions" in name else 1)


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[ServedRun]:
    with serving(folder, tmp_path, mixture()) as run:
        yield run


# Steps and generations


def test_a_step_is_what_each_rank_got_and_the_data_end_within_a_padded_one(
    folder: Path, tmp_path: Path
) -> None:
    document = flat([DOCS, PROSE], last_micro_step="pad", sequence_length=16)
    with serving(folder, tmp_path, document) as served:
        trainer = Trainer(served, 1, 4).train_to(10**6)
        length = len(trainer.taken())
        assert length % 4, "the data shall end within a step"
        for step in range(-(-length // 4)):
            found = traced(served).micro_step(step, None, None, False)
            assert found == traced(served).micro_step(step, 0, None, False)
            assert (found.begin, found.end, found.world_size, found.batch_size) == (
                step * 4, min(step * 4 + 4, length), 1, 4,
            )  # fmt: skip
            (only,) = found.ranks
            assert only.padding == 4 - (found.end - found.begin)
            assert [sample.sample for sample in only.samples] == list(range(found.begin, found.end))
        with pytest.raises(
            BeyondHorizon, match=rf"micro-step {step + 1} of run 'test' was not .* before {length};"
        ):
            traced(served).micro_step(step + 1, None, None, False)
        with pytest.raises(
            BeyondHorizon, match=rf"sample {length} of run 'test' was not delivered"
        ):
            traced(served).sample(length, None, False)


def test_a_generation_that_was_taken_back_is_still_told(served: ServedRun) -> None:
    first = Trainer(served, 1, 1).train_to(50)
    text, _ = served.snapshots.at(20)
    second = Trainer(served, 1, 2, state=text.encode()).train_to(30)
    assert second.ranks[0].joined.opening.parent == 1
    assert {i: second.taken()[i] for i in range(20, 30)} == {
        i: first.taken()[i] for i in range(20, 30)
    }
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
        found = traced(served).sample(index, generation, False)
        assert (found.generation, found.status, found.micro_step, found.place) == where
        assert documents_ids(found) == ids_of(first.taken()[index].ids)
    rewound = traced(served).micro_step(49, 0, 1, True).ranks[0].samples[0]
    assert rewound == traced(served).sample(49, 1, True)
    # Nothing that lies ahead of the present generation is told of it.
    for index, generation, says in (
        (10**6, None, r"generation 2, which began at sample 20, has produced those before"),
        (10**6, 1, r"sample 1000000 is \d+ samples beyond sample .* goes 65536 further"),
        (5000, 1, r"sample 5000 does not exist: the data end at sample \d+"),
    ):
        with pytest.raises(BeyondHorizon, match=says):
            traced(served).sample(index, generation, False)
    with pytest.raises(
        BeyondHorizon, match=r"micro-step 5000 of generation 1 does not exist: .* the data end at"
    ):
        traced(served).micro_step(5000, None, 1, False)
    with pytest.raises(NotFound, match=r"there is no generation 3; the ledger has 1 to 2"):
        traced(served).sample(0, 3, False)
    with pytest.raises(ConfigError, match=r"rank is 1, but generation 2 has ranks 0 to 0"):
        traced(served).micro_step(0, 1, None, False)


def test_micro_steps_are_traced_as_each_rank_got_them_also_after_a_restart(
    folder: Path, tmp_path: Path
) -> None:
    server = Place(folder, tmp_path, mixture(window_micro_steps=4))
    first = Trainer(server.serve(), 3, 2)
    first.train(6)
    second = Trainer(first.ranks[0].served, 2, 2, state=first.state(24))
    second.train(4)
    traces = server.restart().companion(Traces)
    for generation, trainer, start, step_samples in ((1, first, 0, 6), (2, second, 24, 4)):
        for number in range(len(trainer.taken()) // step_samples):
            found = traces.micro_step(number, None, generation, False)
            begin = start + number * step_samples
            assert (found.begin, found.end, found.world_size) == (
                begin,
                begin + step_samples,
                len(trainer.ranks),
            )
            for rank, traced in zip(trainer.ranks, found.ranks, strict=True):
                assert traces.micro_step(number, traced.rank, generation, False).ranks == [traced]
                got = sorted(index for index in rank.taken if found.begin <= index < found.end)
                assert [sample.sample for sample in traced.samples] == got
                for place, sample in enumerate(traced.samples):
                    source, wire = rank.taken[sample.sample]
                    assert (sample.source_id, documents_ids(sample)) == (source, ids_of(wire))
                    assert (sample.micro_step, sample.rank, sample.place) == (
                        number,
                        traced.rank,
                        place,
                    )
                    rewound = generation == 1 and sample.sample >= 24
                    assert sample.status == ("rewound" if rewound else "committed")
                    assert traces.sample(sample.sample, generation, False) == sample
    server.stop()


def test_of_a_run_that_nobody_joined_nothing_is_told(served: ServedRun) -> None:
    with pytest.raises(BeyondHorizon, match="has delivered nothing yet: no trainer has joined it"):
        traced(served).sample(0, None, False)
    with pytest.raises(BeyondHorizon, match="has delivered nothing yet"):
        traced(served).micro_step(0, None, 1, False)


# Bounds


def test_how_far_an_old_generation_came_is_taken_from_its_journal(
    revisable: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.run.past.AHEAD_SAMPLES", 3)
    served = revisable.serve()
    first = Trainer(served, 1, 1)
    for to in range(4, 72, 4):
        first.train_to(to)
    Trainer(served, 1, 1, resume="fresh").train_to(4)
    coordinator = served.coordinator
    for _ in range(3):
        coordinator.ledger.execute(
            ThinJournal(coordinator.uid, coordinator.stream, coordinator.lease.epoch)
        )
    digest = 0
    for index in range(64):
        source, wire = first.taken()[index]
        digest = digest_after(digest, source, wire)
        assert traced(served).sample(index, 1, False).digest == digest_hex(digest)
    with pytest.raises(BeyondHorizon):
        traced(served).sample(400, 1, False)


def test_a_trace_has_so_many_tokens_and_documents_but_for_one_sample(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder, tmp_path, flat([PROSE], sequence_length=32)) as served:
        Trainer(served, 1, 4).train_to(10**6)
        assert len(traced(served).micro_step(1, None, None, False).ranks[0].samples) == 4
        for limit, most, text, says in (
            ("DOCUMENTS", 3, False, "4 samples have more than 3 documents, .* ask for one rank"),
            ("TEXT_TOKENS", 100, True, "tells of 100 at most with their text: ask for one rank"),
            ("TOKENS", 63, False, "4 samples have 128 tokens, and one trace tells of 63 at most"),
        ):
            monkeypatch.setattr(f"tokenloom_tools.trace.MAX_{limit}", most)
            with pytest.raises(LimitExceeded, match=says):
                traced(served).micro_step(1, None, None, text)
        assert len(traced(served).sample(4, None, False).documents) > 0


def test_traces_and_peeks_share_their_places(served: ServedRun) -> None:
    with ExitStack() as places:
        Trainer(served, 1, 1).train_to(4)
        for _ in range(MAX_PEEKS):
            places.enter_context(served.peeks.open(served.coordinator.uid, 0, 1))
        with pytest.raises(TooManyPeeks):
            traced(served).sample(0, None, False)
        places.close()
        assert traced(served).sample(0, None, False).sample == 0


def test_a_trace_that_takes_too_long_goes_on_when_it_is_asked_again(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.order.replay.TURN_TOKENS", 40)
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 1000)
    trainer = Trainer(served, 1, 1).train_to(61)
    # A second passes at each look at the clock: at the one of that module, for others' threads go on by the true one.
    clock = SimpleNamespace(monotonic=partial(next, map(float, itertools.count())))
    monkeypatch.setattr("tokenloom_tools.trace.time", clock)
    monkeypatch.setattr("tokenloom_tools.trace.MAX_FORWARD_S", 1.5)
    asked = 0
    while True:
        asked += 1
        try:
            found = traced(served).sample(60, None, False)
            break
        except ServerStopping as error:
            assert "ask again" in str(error)
    assert documents_ids(found) == ids_of(trainer.taken()[60].ids)
    assert asked > 3


def test_rows_that_changed_since_are_not_told_as_if_they_were_the_sample(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    with serving(folder, ledger, flat([PROSE])) as served:
        Trainer(served, 1, 1).train_to(4)
        order = served.coordinator.order
        group = Replay(Timeline(order), order.initial()).samples(1, 4)
        path = folder / PATHS[PROSE][0]
        written = path.stat()
        path.write_bytes(path.read_bytes().translate(bytes.maketrans(b"123", b"321")))
        # A change that shows by the time of writing is refused when the file is opened again.
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
        with pytest.raises(
            OrderMismatch, match=r"sample \d of run 'test' has other tokens than its rows"
        ):
            next(explain(order, group, None, False))


# Revisions


@pytest.fixture
def revisable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A run of three sources, in which a revision may hold soon."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 4)
    place = Place(folder, tmp_path, flat([CODE, PROSE, WIKI], window_micro_steps=4))
    yield place
    place.stop()


def told_as_received(
    served: ServedRun, trainer: Trainer, indices: Iterable[int], generation: int | None = None
) -> None:
    for index in indices:
        found = traced(served).sample(index, generation, False)
        source, wire = trainer.taken()[index]
        assert (found.source_id, documents_ids(found)) == (source, ids_of(wire)), index


def test_samples_before_and_behind_revisions_are_told_by_the_rows_they_had(
    revisable: Place, tmp_path: Path
) -> None:
    excluded = tmp_path / "out.jsonl"
    lines = [{"spec": CODE, "shard": PATHS[CODE][0], "row": row} for row in range(5, 14)]
    excluded.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    served = revisable.serve()
    trainer = Trainer(served, 1, 1).train_to(6)
    changes: list[dict[str, Any]] = [
        {"exclude": {"file": str(excluded)}},
        {"set": [{"child": CODE, "weight": 3}], "drop": [PROSE]},
        {"add": [{"child": {"source": DOCS, "weight": 2}}]},
    ]
    held = []
    for to, change in zip((7, 30, 60), changes, strict=True):
        trainer.train_to(to)
        held.append(revise(served, **change).sample_index)
    assert held == sorted(set(held))
    trainer.train_to(10**6)
    told_as_received(served, trainer, sorted(trainer.taken()))
    rows = {
        (document.shard, document.row)
        for index in range(held[0] + 8, len(trainer.taken()))
        for document in traced(served).sample(index, None, False).documents
    }
    assert not rows & {(line["shard"], line["row"]) for line in lines}
    # A step that lies on both sides of each.
    late = Trainer(served, 1, 7, resume="fresh").train_to(10**6)
    for step in range(len(late.taken()) // 7):
        found = traced(served).micro_step(step, 0, 2, True)
        assert [sample.sample for sample in found.ranks[0].samples] == list(
            range(step * 7, step * 7 + 7)
        )
        for sample in found.ranks[0].samples:
            assert documents_ids(sample) == sample.ids == ids_of(late.taken()[sample.sample].ids)


def test_a_generation_from_before_a_revision_is_told_without_it(revisable: Place) -> None:
    served = revisable.serve()
    first = Trainer(served, 1, 1).train_to(60)
    text, _ = served.snapshots.at(20)
    second = Trainer(served, 1, 1, state=text.encode()).train_to(24)
    index = revise(served, drop=[PROSE]).sample_index
    assert 24 < index < 50
    second.train_to(60)
    assert second.taken()[59] != first.taken()[59]
    told_as_received(served, second, range(20, 60))
    told_as_received(served, first, range(60), 1)
    told_as_received(served, first, range(20))
    for step in range(60):
        (sample,) = traced(served).micro_step(step, 0, 1, True).ranks[0].samples
        assert sample.ids == ids_of(first.taken()[step].ids)


def test_a_peek_ahead_takes_a_revision_that_comes_or_is_told_that_it_came_too_late(
    revisable: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = revisable.serve()
    with ExitStack() as open_peeks:
        trainer = Trainer(served, 1, 1).train_to(4)
        near, far, resting = (
            open_peeks.enter_context(served.peeks.open(served.coordinator.uid, at, 1))
            for at in (5, 70, 70)
        )
        seen = []
        for peek, at in ((near, 5), (far, 70), (resting, 70)):
            peek.progress(at, 1)
            seen.append(_taken(peek, 1))
        monkeypatch.setattr("tokenloom_server.replay.peek.REST_S", 0.0)
        assert isinstance(resting.next(0.01, never), Waiting)
        assert resting._replay.rests
        index = revise(served, drop=[PROSE]).sample_index
        assert 6 < index < 60
        near.progress(6, 100)
        trainer.train_to(10**6)
        shown = seen[0] + _taken(near, 60)
        assert shown == [trainer.taken()[at].ids for at in range(5, 66)]
        for peek in (far, resting):
            peek.progress(71, 1)
            with pytest.raises(
                OrderMismatch,
                match=rf"the mixture was revised at sample {index} while this peek was",
            ):
                _taken(peek, 1)
        with served.peeks.open(served.coordinator.uid, 70, 1) as again:
            again.progress(70, 1)
            assert _taken(again, 1) == [trainer.taken()[70].ids]


def _taken(peek: Peek, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        made = peek.next(PATIENCE_S, never)
        assert isinstance(made, Delivery), made
        found += [sample.tobytes() for sample in made.group.ids(0, made.first, made.last)]
    return found[:count]


def test_samples_after_a_skip_are_told_as_received_and_what_was_passed_over_by_the_line_before(
    revisable: Place,
) -> None:
    served = revisable.serve()
    before = Trainer(served, 1, 1).train_to(40)
    served.restores.restore(sample_index=8, skip_samples=11)
    after = Trainer(served, 1, 1).train_to(30)
    told_as_received(served, after, range(8, 30))
    told_as_received(served, before, range(40), 1)
    assert traced(served).sample(12, 1, False).status == "rewound"
    assert_numbered(served, after.taken() | {i: before.taken()[i] for i in range(8)})


def assert_numbered(served: ServedRun, line: dict[int, Any]) -> None:
    """That a source's samples have the numbers in which the trainers of a line got them, and that any is drawn."""
    for source, spec in enumerate(served.coordinator.order.record.specs):
        indices = [index for index in sorted(line) if line[index].source == source]
        assert [
            traced(served).of_source(spec, i, False).sample for i in range(len(indices))
        ] == indices
        with pytest.raises(
            BeyondHorizon, match=rf"has given {len(indices)} samples .* found {len(indices)}"
        ):
            traced(served).of_source(spec, len(indices), False)
        drawn = {traced(served).of_source(spec, None, False).sample for _ in range(6)}
        assert len(drawn) > 1 and drawn <= {*indices}


def test_the_samples_of_a_source_are_counted_over_launches_revisions_and_restarts(
    revisable: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.order.replay.TURN_TOKENS", 40)
    served = revisable.serve()
    with pytest.raises(BeyondHorizon, match="no trainer has joined"):
        traced(served).of_source(CODE, None, False)
    first = Trainer(served, 1, 1).train_to(40)
    second = Trainer(served, 2, 1, state=first.state(20)).train_to(24)
    revise(served, add=[{"child": {"source": DOCS, "alias": "docs", "weight": 3}}])
    second.train_to(60)
    line = {i: first.taken()[i] for i in range(20)} | second.taken()
    assert_numbered(served, line)
    served = revisable.restart()
    # A server that has just come up knows the counts at the state boundary before the commit.
    boundary = served.coordinator.view().state.sample_index
    assert boundary > 50
    assert_numbered(served, {i: line[i] for i in range(boundary)})
    sample = traced(served).of_source("docs", 2, True)
    assert sample == traced(served).sample(sample.sample, None, True)
    with pytest.raises(
        NotFound, match=r"source: run 'test' has no source 'web'; it has .*, 'docs'"
    ):
        traced(served).of_source("web", 0, False)


def test_rows_in_batches_have_numbers_and_shapes(tmp_path: Path) -> None:
    write_features(tmp_path)
    with serving(tmp_path, tmp_path, features_document(window_micro_steps=4)) as served:
        assert_numbered(served, Trainer(served, 1, 4).train_to(60).taken())
        (row,) = traced(served).of_source(LATENTS, 3, True).documents
        assert '"latent": "float16 [' in (row.text or "") and row.parts is None


@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.parametrize(
    "fields",
    [
        {"mask_boundaries": True, "tail": "pad", "padding": "left"},
        {"packing": "best_fit", "pack_window_rows": 9, "loss_mask": "mask"},
        {"packing": "none", "loss_mask": "mask", "mask_boundaries": True},
    ],
    ids=["boundaries", "mask", "both"],
)
def test_parts_of_documents_say_which_ids_are_labels(
    tmp_path: Path, labels: str, fields: dict[str, Any]
) -> None:
    folder = write_corpus(tmp_path / "corpus")
    lengths = numbers(60, 77, 0, 50)
    words = b"a\xc3\xa9\xe2\x82\xac b"  # of one, two and three bytes
    table = {
        "ids": pa.array([list((words * 9)[:n]) for n in lengths], pa.list_(pa.int32())),
        "mask": pa.array(
            [numbers(n, 500 + i, 0, 2) for i, n in enumerate(lengths)], pa.list_(pa.int8())
        ),
    }
    pq.write_table(pa.table(table), folder / "data/masked.parquet")
    document = flat(
        [PROSE, "parquet:data/masked.parquet:ids"], labels=labels, sequence_length=24, pad_id=0
    )
    document |= {name: value for name, value in fields.items() if name != "loss_mask"}
    document["mixture"]["children"][1] |= {"loss_mask": "mask"} if "loss_mask" in fields else {}
    with serving(folder, tmp_path, document) as served:
        timeline = served.coordinator.timeline
        group = Replay(timeline, timeline.initial()).samples(1, 40)
        Trainer(served, 1, 1).train_to(40)
        divided = 0
        for index in range(40):
            sample = traced(served).sample(index, None, True)
            counted: list[bool] = []
            for each in sample.documents:
                parts = each.parts or [
                    TracedPart(tokens=each.end - each.begin, counts=True, text=each.text)
                ]
                counted += [part.counts for part in parts for _ in range(part.tokens)]
                shown = "".join(part.text or "" for part in parts)
                # A character that two parts share is none in either.
                assert all(
                    one in (other, "\ufffd")
                    for one, other in zip(shown, each.text or "", strict=True)
                )
                divided += len(parts) > 1
            assert len(counted) == len(sample.ids or ())
            assert sum(counted[1:]) == group.real_tokens(index)[1]
        assert divided > 8
        assert traced(served).sample(1, None, False).documents[0].parts is None


def test_a_generation_whose_revision_was_dropped_since_is_not_told_without_it(
    revisable: Place,
) -> None:
    served = revisable.serve()
    first = Trainer(served, 1, 1).train_to(4)
    text, _ = served.snapshots.at(4)
    index = revise(served, drop=[PROSE], sample_index=12).sample_index
    for to in range(8, 60, 4):
        first.train_to(to)
    told_as_received(served, first, range(56))
    second = Trainer(served, 1, 1, state=text.encode()).train_to(5)
    told_as_received(served, first, range(56), 1)
    served.revision_handler.drop(1)
    told_as_received(served, second, range(4, 5))
    for at in (index - 1, index, 50):
        with pytest.raises(SnapshotInvalid, match="a revision was dropped"):
            traced(served).sample(at, 1, False)

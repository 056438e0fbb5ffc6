"""The history of a run: what a server writes of it, and what is read back."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import write_jsonl
from support.redis_server import RedisServer
from support.served import RUN, Place, Trainer, revise
from support.waiting import wait_for
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.errors import LedgerUnavailable
from tokenloom_server.ledger import sqlite_file
from tokenloom_server.ledger.base import HistoryEntry, Ledger
from tokenloom_server.ledger.redis import RedisLedger
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.ledger.sqlite_rows import SqliteHistory
from tokenloom_server.reports.history import RunHistory
from tokenloom_server.run.history import is_kept
from tokenloom_server.run.losses import Report
from tokenloom_server.run.recorder import MAX_EVENTS

NEVER, ALWAYS = float("-inf"), float("inf")
#: Brings up a server of a place, beside those that are there, by the name of its holder.
Serve = Callable[..., ServedRun]


def told_when_to_look(served: ServedRun) -> ServedRun:
    """From here on its history is written in ``step`` alone: two threads would write all twice."""
    served.recorder.end(20)
    return served


@pytest.fixture(params=["sqlite", "redis"])
def serve(request: pytest.FixtureRequest, place: Place) -> Iterator[Serve]:
    up: list[tuple[Runs, Ledger]] = []
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""

    def serve(holder: str = "one", standby: bool = False) -> ServedRun:
        ledger = RedisLedger(url) if url else SqliteLedger(place.ledger_path)
        # With the same holder each leads at once.
        up.append((Runs(ledger, holder, place.timeouts, standby=standby), ledger))
        return told_when_to_look(up[-1][0].add(place.path, None))

    yield serve
    for runs, ledger in up:
        runs.stop()
        ledger.close()


def points(served: ServedRun) -> RunHistory:
    return served.history.read(NEVER, ALWAYS, 2000)


def happened(served: ServedRun, *kinds: str) -> list[str]:
    return [event.text for event in served.history.events(NEVER, ALWAYS, kinds).events]


def test_points_and_events_outlast_a_restart_and_none_is_repeated(serve: Serve) -> None:
    served = serve()
    trainer = Trainer(served)
    trainer.train(10)
    # Where comparing finds nothing of it, it stays what a caller did.
    served.recorder.note("revision", "alice paused code", author="alice")
    served.recorder.step()
    first = points(served)
    assert first.sample_index[-1] == trainer.index == 40
    assert first.total_tokens[-1] == sum(source.tokens[-1] or 0 for source in first.sources) == 320
    assert sum(source.actual_share[-1] or 0 for source in first.sources) == pytest.approx(1)
    (event,) = served.history.events(NEVER, ALWAYS, ["audit"]).events
    assert (event.text, event.author, event.sample_index) == ("alice paused code", "alice", 40)
    launch = "generation 1 begins at sample 0 with 2 ranks and batches of 2 samples each"
    assert happened(served, "launch") == [launch]

    again = serve()
    assert points(again) == first
    trainer.connect(again)
    trainer.train(3)
    again.recorder.step()
    assert points(again).sample_index == [*first.sample_index, 52]
    assert happened(again) == [
        launch,
        "alice paused code",
        "server one took the lead again, at server epoch 2",
    ]
    # What the list of runs shows, of before the restart, too.
    assert again.recorder.recent.rates == points(again).tokens_per_s
    last = again.recorder.recent.last_event
    assert last is not None and last.text == happened(again)[-1]
    assert points(again).run == RUN and not any(points(again).rewound)


def test_what_a_later_launch_takes_back_stays_and_is_marked(serve: Serve) -> None:
    served = serve()
    Trainer(served).train(10)
    revise(served, reason="more code", author="ada", set=[{"child": "code", "weight": 3}])
    served.recorder.step()
    served.restores.restore(sample_index=20, skip_samples=4)
    served.recorder.note("pin", "next launch: at sample 20", author="bob")
    served.recorder.step()
    again = serve()
    trainer = Trainer(
        again,
        state=again.coordinator.pins.pin.snapshot.encode() if again.coordinator.pins.pin else b"",
    )
    trainer.train(2)
    again.recorder.step()
    history = points(again)
    before = [
        (index, rewound)
        for index, rewound in zip(history.sample_index, history.rewound, strict=True)
    ]
    assert (40, True) in before and before[-1] == (28, False) and history.generation[-1] == 2
    events = again.history.events(NEVER, ALWAYS).events
    assert {event.kind for event in events} == {
        "launch",
        "revision",
        "pin",
        "failover",
        "rewind",
        "skip",
    }
    assert len(events) == 6
    (revision,) = [event for event in events if event.kind == "revision"]
    assert revision.author == "ada" and revision.text.endswith(": more code") and revision.rewound
    assert happened(again, "rewind") == [
        "generation 2 goes back from sample 40 to 20 with 2 ranks and batches of 2 samples each"
    ]
    assert happened(again, "skip") == [
        "from sample 20 on the run passes over 4 samples at sample 20"
    ]
    assert [event.author for event in events if event.kind == "pin"] == ["bob"]
    assert happened(again, "pin") == [
        "the next launch is to begin at sample 20, and to pass over 4 samples at sample 20"
    ]


def test_a_standby_that_takes_over_goes_on_where_the_history_ends(serve: Serve) -> None:
    old, new = serve("old"), serve("new", standby=True)
    trainer = Trainer(old)
    trainer.train(5)
    new.recorder.step()
    assert points(new) == points(old)  # one that stands by writes nothing
    old.recorder.step()
    old.coordinator.stop()
    old.leadership.end(20)
    wait_for(new.coordinator.leads, "the standby leads")
    trainer.connect(new)
    trainer.train(5)
    new.recorder.step()
    assert points(new).sample_index[-2:] == [20, 40]
    assert happened(new, "failover") == [
        "server new took the lead over from old, at server epoch 2"
    ]
    assert len(happened(new, "launch")) == 1


def test_a_server_of_an_older_epoch_writes_nothing(serve: Serve) -> None:
    old = serve()
    Trainer(old).train(5)
    # Before it knows that another one leads.
    new = serve()
    old.recorder.note("audit", "too late")
    old.recorder.step()
    assert "too late" not in happened(new)


def test_an_old_ledger_tells_what_happened_before_there_was_a_history(place: Place) -> None:
    served = place.serve()
    Trainer(served).train(5)
    Trainer(served, resume="fresh").train(5)
    place.stop()
    for file in place.ledger_path.parent.glob("ledger.history.db*"):
        file.unlink()
    again = place.serve()
    again.recorder.end(20)
    kinds = [event.kind for event in again.history.events(NEVER, ALWAYS).events]
    assert kinds == ["launch", "rewind"]
    assert (place.ledger_path.parent / "ledger.history.db").stat().st_mode & 0o777 == 0o600


def test_bad_rows_and_the_end_are_events_and_another_run_has_none_of_them(
    made: Callable[..., Place], folder: Path
) -> None:
    write_jsonl(folder / "data/bad.jsonl", ["good"] * 5)
    with (folder / "data/bad.jsonl").open("a") as file:
        file.write("{ bad\n" * 3 + '{"text": "good"}\n' * 5)
    source = {"source": "jsonl:data/bad.jsonl:text", "alias": "broken"}
    place = made(
        mixture={"policy": "sequential", "children": [source]}, on_bad_row="skip", max_bad_rows=5
    )
    served = place.serve()
    trainer = Trainer(served, world_size=1, batch_size=1)
    trainer.train(100)
    served.recorder.end(20)
    assert happened(served, "bad_rows") == [
        "rows that did not decode were passed over: 3 of broken"
    ]
    (end,) = happened(served, "end")
    assert end.startswith("the data end at sample ")
    # What was asked for last stays, and nothing is committed any more.
    assert (points(served).sources[0].target_share[-1], points(served).tokens_per_s[-1]) == (1, 0)
    place.stop()
    place.ledger_path.unlink()
    other = place.serve()
    other.recorder.end(20)
    assert (points(other).time, happened(other)) == ([], [])


def test_a_source_that_ran_out_and_a_rank_that_was_lost_are_events_once_and_in_the_log(
    made: Callable[..., Place],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for alias, rows in ("few", 3), ("many", 200):
        write_jsonl(folder / f"data/{alias}.jsonl", ["some more words"] * rows)
    children = [
        {"source": f"jsonl:data/{alias}.jsonl:text", "alias": alias} for alias in ("few", "many")
    ]
    place = made(mixture={"policy": "least_consumed", "children": children})
    served = told_when_to_look(place.serve())
    trainer = Trainer(served)
    trainer.train(1)
    served.recorder.step()
    state = trainer.state()
    assert happened(served, "exhausted") == []
    trainer.train(20)
    monkeypatch.setattr("tokenloom_server.run.events.LOST_AFTER_S", 0.0)
    with caplog.at_level(logging.INFO):
        served.coordinator.sessions.detach(trainer.ranks[1].session)
        served.recorder.step()
        served.recorder.step()
    ran_out = "source few ran out after 48 tokens, 1.00 passes: the others share what it had"
    assert happened(served, "exhausted") == [ran_out] and ran_out in caplog.text
    lost = "rank 1 is lost: nothing was heard for 0 s"
    assert happened(served, "rank") == [lost] and lost in caplog.text
    trainer.ranks[1].connect(served)
    served.recorder.step()
    assert happened(served, "rank") == [lost, "rank 1 is back"]
    # After a launch that goes back it may run out again.
    trainer.leave()
    trainer = Trainer(served, state=state)
    trainer.train(1)
    served.recorder.step()
    trainer.train(20)
    served.recorder.step()
    assert happened(served, "exhausted") == [ran_out] * 2


@pytest.mark.parametrize("rule", ["drop", "pad"])
@pytest.mark.parametrize("looked", [True, False])
def test_an_end_is_written_at_once_and_found_again_where_a_killed_server_did_not(
    made: Callable[..., Place], folder: Path, rule: str, looked: bool
) -> None:
    write_jsonl(folder / "data/few.jsonl", ["some more words"] * 40)
    source = {"source": "jsonl:data/few.jsonl:text", "alias": "few"}
    place = made(mixture={"policy": "sequential", "children": [source]}, last_micro_step=rule)
    served = told_when_to_look(place.serve())
    trainer = Trainer(served)
    trainer.train(3)
    served.recorder.step()
    trainer.train(10**6)
    last = trainer.index
    if looked:
        served.recorder.step(is_due=False)
    assert len(happened(served, "end")) == looked
    place.stop()  # the recorder has ended before, so it writes nothing

    again = told_when_to_look(place.serve())
    again.recorder.step()
    (end,) = happened(again, "end")
    assert end.startswith(f"the data end at sample {last}: ")
    # A launch that is not at the end has none of its own.
    trainer = Trainer(again, resume="fresh")
    trainer.train(2)
    place.stop()
    again = told_when_to_look(place.serve())
    again.recorder.step()
    assert happened(again, "end") == [end]


def test_a_history_that_cannot_be_written_stops_nothing_and_is_said_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    (place.ledger_path.parent / "ledger.history.db").mkdir()
    served = told_when_to_look(place.serve())
    trainer = Trainer(served)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            trainer.train(2)
            served.recorder.step()
    assert served.measures.history_failures.value >= 3
    assert (
        len(
            [
                record
                for record in caplog.records
                if "the history cannot be written" in record.message
            ]
        )
        == 1
    )
    (place.ledger_path.parent / "ledger.history.db").rmdir()
    served.recorder.step()
    assert points(served).sample_index == [24] and len(happened(served, "launch")) == 1


def test_a_history_that_another_process_holds_locked_holds_up_no_reader_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
    ledger = SqliteLedger(tmp_path / "ledger.db")
    history = ledger.history()
    assert isinstance(history, SqliteHistory)
    history.write("uid", "train", 0, [], [])
    point = HistoryEntry("points", 0, 0.0, "{}")
    with (
        closing(sqlite3.connect(history.path, isolation_level=None)) as other,
        ThreadPoolExecutor(64) as runs,
    ):
        other.execute("BEGIN IMMEDIATE")
        writes = [runs.submit(history.write, "uid", "train", 0, [point], []) for _ in range(64)]
        assert history.entries("uid", "train", "points") == []
        ledger.close()
        assert {type(write.exception()) for write in writes} == {LedgerUnavailable}


def test_a_redis_that_refuses_the_history_or_is_away_stops_no_run(
    place: Place, tmp_path: Path
) -> None:
    redis_server = RedisServer(tmp_path).start()
    ledger = RedisLedger(redis_server.url())
    runs = Runs(ledger, "one", place.timeouts)
    try:
        served = told_when_to_look(runs.add(place.path, None))
        key = f"tokenloom:{{{served.coordinator.uid}}}:train:history:points"
        redis_server.client().set(key, "in the way")
        trainer = Trainer(served)
        trainer.train(3)
        served.recorder.step()
        assert served.measures.history_failures.value
        redis_server.client().delete(key)
        redis_server.kill()
        served.recorder.step()
        trainer.take(2)
        redis_server.start()
        trainer.settle()
        wait_for(served.coordinator.leads, "the lease is there again")
        served.recorder.step()
        assert points(served).sample_index[-1] == 20
    finally:
        runs.stop()
        ledger.close()
        redis_server.stop()


def test_events_are_bounded_and_the_frequent_ones_go_first(place: Place) -> None:
    served = told_when_to_look(place.serve())
    Trainer(served).train(1)
    served.recorder.step()
    for number in range(3):
        for _ in range(MAX_EVENTS // 2):
            served.recorder.note("audit", f"part {number} " + 600 * "x", author=200 * "y")
        served.recorder.step()
    events = served.history.events(NEVER, ALWAYS)
    assert len(events.events) == MAX_EVENTS + 1 and events.dropped == MAX_EVENTS // 2
    assert {(len(event.text), len(event.author)) for event in events.events[1:]} == {(500, 100)}
    assert not [event for event in events.events if event.text.startswith("part 0")]


def test_losses_of_a_short_run_have_more_points_than_one_in_ten_seconds(place: Place) -> None:
    served = told_when_to_look(place.serve())
    trainer = Trainer(served)
    trainer.train(1)
    served.recorder.step()
    for step in range(2, 6):
        trainer.train(1)
        report = Report(
            sample_index=trainer.index,
            total_tokens=8 * trainer.index,
            step=step,
            sources={0: (1 / step, 8)},
            loss=1 / step,
        )
        served.losses.add(served.coordinator.uid, 1, trainer.attempt, report)
        served.recorder.step(is_due=False)
    served.recorder.step()
    history = points(served)
    assert history.step[-4:] == [2, 3, 4, 5]
    # Where there is one source, its loss and that of all are the same, and smoothed alike.
    assert history.loss[-4:] == history.sources[0].loss[-4:] and history.loss[-1] > 1 / 5
    assert history.sources[0].loss[-4:] == sorted(history.sources[0].loss[-4:], reverse=True)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 20_000), st.sampled_from([1, 48, 200, 5000]))
def test_points_are_thinned_with_age_and_bounded(newest: int, sources: int) -> None:
    kept = [number for number in range(newest + 1) if is_kept(number, newest, sources)]
    assert kept[:1] == [0] and (sources > 64 or kept[-1] == newest)
    assert len(kept) <= max(2000 * min(1, 64 / sources), 48)
    # What was dropped is asked for at no later time, and older parts are never denser than newer ones.
    assert all(
        is_kept(number, newest, sources)
        for number in range(newest + 1)
        if is_kept(number, newest + 1, sources)
    )
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(gaps))


def test_entries_of_a_store_are_thinned_as_the_rule_says(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.run.history.EVEN_POINTS", 8)
    monkeypatch.setattr("tokenloom_server.run.history.NEW_POINTS", 2)
    served = told_when_to_look(place.serve())
    trainer = Trainer(served, world_size=1, batch_size=1)
    for _ in range(65):
        trainer.train(1)
        served.recorder.step()
    store, run = served.coordinator.ledger.history(), served.coordinator
    assert store is not None
    numbers = [entry.number for entry in store.entries(run.uid, run.stream, "points")]
    assert numbers == [number for number in range(65) if is_kept(number, 64, 4)]
    assert len(numbers) < 30
    gone = HistoryEntry("points", 1, 0.0)
    assert store.read(run.uid, run.stream, [gone]) == []

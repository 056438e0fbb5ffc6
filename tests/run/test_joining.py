"""Joins: rank 0 opens an attempt's generation, the others agree or are refused."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from support.served import SCHEDULE, Place, Rank, Trainer, call_of
from tokenloom import ConnectionOptions, Fenced, LaunchOptions, NumpyDataset, RemoteDataset
from tokenloom.connection import join as client_join
from tokenloom.connection import topology
from tokenloom_server.api.grpc.server import GrpcServer
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import (
    AttemptUsed,
    ConfigError,
    JoinRefused,
    LedgerRolledBack,
    LedgerUnavailable,
    NotFound,
    RunBusy,
    ServerStopping,
    SnapshotInvalid,
)
from tokenloom_server.order import replay
from tokenloom_server.run import resume_points
from tokenloom_server.run.resume_points import ResumePoints
from tokenloom_server.run.timeouts import Timeouts


def test_rank_0_opens_with_one_write_and_the_others_join_it(
    place: Place, served: ServedRun
) -> None:
    assert place.stored().opening is None
    first = served.join_handler.join(call_of(0))
    stored = place.written()
    assert stored.opening == first.opening
    assert (first.opening.generation, first.opening.parent, first.opening.start_index) == (1, 0, 0)
    assert (place.committed().sample_index, place.committed().digest) == (0, "0" * 32)
    assert served.join_handler.join(call_of(1)) == first
    assert place.written() == stored


def test_a_rank_that_comes_first_waits_for_rank_0(served: ServedRun, in_thread: Any) -> None:
    outcome = in_thread(lambda: served.join_handler.join(call_of(1)))
    first = served.join_handler.join(call_of(0))
    assert outcome() == first


def test_a_waiting_rank_hears_why_rank_0_was_refused(served: ServedRun, in_thread: Any) -> None:
    outcome = in_thread(lambda: served.join_handler.join(call_of(1, resume="nothing-of-that-name")))
    with pytest.raises(NotFound):
        served.join_handler.join(call_of(0, resume="nothing-of-that-name"))
    error = outcome()
    assert isinstance(error, NotFound) and "nothing-of-that-name" in str(error)
    # What was refused once may be mended, under the same attempt; a rank that comes before rank 0 waits for it.
    outcome = in_thread(lambda: served.join_handler.join(call_of(1)))
    served.join_handler.join(call_of(0))
    assert outcome().opening.generation == 1
    assert served.join_handler.join(call_of(1)).opening.generation == 1


def test_a_waiting_rank_hears_that_the_server_stops(served: ServedRun, in_thread: Any) -> None:
    outcome = in_thread(lambda: served.join_handler.join(call_of(1)))
    served.coordinator.stop()
    assert isinstance(outcome(), ServerStopping)


def test_waiting_for_rank_0_is_bounded(served: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom_server.run.join.RANK_0_WAIT_S", 0.05)
    with pytest.raises(JoinRefused, match="rank 1 waited 0 s for rank 0 of attempt 'a'"):
        served.join_handler.join(call_of(1))


def test_the_same_process_may_ask_again(place: Place, served: ServedRun) -> None:
    first = served.join_handler.join(call_of(0))
    assert served.join_handler.join(call_of(0)) == first
    assert (
        place.restart().join_handler.join(call_of(0)).opening
        == first.opening
        == place.stored().opening
    )


def test_another_process_on_a_slot_needs_a_new_attempt(served: ServedRun) -> None:
    for rank in (0, 1):
        served.join_handler.join(call_of(rank))
    for rank in (0, 1):
        with pytest.raises(AttemptUsed):
            served.join_handler.join(call_of(rank, nonce="another"))
    # Nothing of that hurts those that are there.
    for rank in (0, 1):
        served.join_handler.join(call_of(rank))


def test_an_attempt_id_opens_once(place: Place, served: ServedRun) -> None:
    for attempt in ("one", "two"):
        served.join_handler.join(call_of(0, attempt=attempt))
    for restart in (False, True):
        served = place.restart() if restart else served
        for rank in (0, 1):
            with pytest.raises(AttemptUsed, match="one"):
                served.join_handler.join(call_of(rank, attempt="one"))
    assert place.stored().opening is not None
    assert served.coordinator.view().generation.number


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"world_size": 3}, "rank 1 has world size 3, but rank 0 of attempt 'a' opened it with 2"),
        ({"batch_size": 4}, "rank 1 has batch size 4, but rank 0 of attempt 'a' opened it with 2"),
        (
            {"batch_size": SCHEDULE},
            "rank 1 has batch size 2, 5 from 240 total tokens on, 1 from 800 .* opened it with 2$",
        ),
        ({"accumulate": 2}, "rank 1 has accumulate 2, but rank 0 of attempt 'a' opened it with 1"),
        (
            {"resume": "latest"},
            "rank 1 resumes from resume='latest', but rank 0 of attempt 'a' from no state",
        ),
    ],
)
def test_a_rank_that_disagrees_is_refused_with_both_values(
    served: ServedRun, fields: dict[str, Any], says: str
) -> None:
    served.join_handler.join(call_of(0))
    with pytest.raises(JoinRefused, match=says):
        served.join_handler.join(call_of(1, **fields))
    # Rank 0 once more, from a process that disagrees with itself, spoils nothing for the others.
    with pytest.raises(JoinRefused):
        served.join_handler.join(replace(call_of(1, **fields), rank=0, nonce="a-nonce-0"))
    served.join_handler.join(call_of(1))


@pytest.mark.parametrize("skipped", [0, 5])
def test_ranks_with_different_states_are_refused_also_after_a_restart(
    place: Place, served: ServedRun, trainer: Trainer, skipped: int
) -> None:
    trainer.train(3)
    late, early = trainer.state(), trainer.state(4)
    if skipped:
        served.restores.restore(text=late.decode(), skip_samples=skipped)
    served.join_handler.join(call_of(0, attempt="b", state=late))
    for _ in range(2):
        with pytest.raises(
            JoinRefused, match=r"a loaded state at sample 4 .* sample 12 .*same checkpoint on every"
        ):
            served.join_handler.join(call_of(1, attempt="b", state=early))
        served = place.restart()
    joined = served.join_handler.join(call_of(1, attempt="b", state=late))
    assert joined.opening.start_index == 12
    assert sum(source.skipped_samples for source in joined.start.sources) == skipped


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rank": 2}, "rank 2 is not below the world size 2"),
        ({"world_size": 0}, "world size is 0"),
        ({"world_size": 4097}, "world size is 4097; expected 1 to 4096"),
        ({"batch_size": 0}, "batch_size is missing: give the samples of a rank"),
        ({"batch_size": ((0, 0), (8, 1))}, r"batch_size\[0\] has a batch size of 0"),
        ({"batch_size": 2**20 + 1}, "batch size is 1048577"),
        (
            {"batch_sizes": SCHEDULE},
            "batch size is 2 and also a schedule, 2, 5 from 240 .*: give one of them",
        ),
        ({"batch_size": ((8, 2),)}, "begins at 8 total tokens; expected 0"),
        (
            {"world_size": 100, "batch_size": ((0, 2), (8, 2**20))},
            r"a micro-step of 100 ranks × 1048576 samples × 16 bytes has .*; expected at most",
        ),
        (
            {"batch_size": 2**18, "accumulate": 1025},
            "accumulate is 1025, and so many micro-steps of 8388608",
        ),
        ({"accumulate": 0}, "accumulate is 0; expected 1 to"),
        (
            {"accumulate": 4},
            "accumulate is 4, but window_micro_steps in the mixture file is 6; expected at least 8",
        ),
        ({"attempt": ""}, "attempt has 0 characters"),
        ({"attempt": "a" * 257}, "attempt has 257 characters"),
        (
            {"attempt": "a\x1b[2J"},
            "attempt: expected UTF-8 text on one line, without control characters",
        ),
        ({"nonce": ""}, "nonce has 0 characters"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(
    place: Place, served: ServedRun, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(JoinRefused, match=says):
        served.join_handler.join(call_of(**({"rank": 0} | fields)))
    assert place.stored().opening is None


def test_ranks_that_hear_of_a_busy_run_ask_for_longer_than_rank_0(place: Place) -> None:
    # It may be cut off from the server for a while; they gave up before it was heard again.
    place.timeouts = Timeouts(liveness_s=50.0)
    join_handler = place.serve().join_handler
    for rank in range(2):
        join_handler.join(call_of(rank))
    retry_for_s = []
    for rank in range(2):
        with pytest.raises(RunBusy) as refused:
            join_handler.join(call_of(rank, attempt="b", resume="latest"))
        retry_for_s.append(refused.value.retry_for_s)
    assert retry_for_s[1] >= retry_for_s[0] + 30


def test_the_other_ranks_wait_on_while_rank_0_cannot_reach_the_ledger(
    place: Place, served: ServedRun, monkeypatch: pytest.MonkeyPatch, in_thread: Any
) -> None:
    def unreachable(*_: object) -> NoReturn:
        raise LedgerUnavailable("away on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(place.ledger, "read_run", unreachable)
        with pytest.raises(LedgerUnavailable):
            served.join_handler.join(call_of(0))
    other = in_thread(lambda: served.join_handler.join(call_of(1)))
    assert served.join_handler.join(call_of(0)).opening == other().opening


def test_a_rank_whose_opening_the_ledger_has_lost_is_told_so(
    place: Place, served: ServedRun
) -> None:
    served.join_handler.join(call_of(0))
    with contextlib.closing(sqlite3.connect(place.ledger_path)) as file, file:
        file.execute("UPDATE runs SET generation = 0")
        file.execute("DELETE FROM openings")
    with pytest.raises(
        LedgerRolledBack, match=r"'a' opened a generation of run 'test', but sqlite://.* has none"
    ):
        served.join_handler.join(call_of(1))


# --- one rank that is refused ------------------------------------------------------------------------


def test_the_ranks_that_stream_already_hear_at_once_that_another_one_was_refused(
    served: ServedRun, in_thread: Any
) -> None:
    first = Rank(served, call_of(0, 3))
    second = Rank(served, call_of(1, 3))
    waiting = in_thread(lambda: second.take(100))
    with pytest.raises(
        JoinRefused, match="rank 2 has batch size 4, but rank 0 of attempt 'a' opened it with 2"
    ):
        served.join_handler.join(call_of(2, 3, batch_size=4))
    says = r"rank 2 of attempt 'a' was refused, so its launch cannot begin: rank 2 has batch size 4, .* with 2$"
    error = waiting(2.0)
    assert isinstance(error, JoinRefused) and re.match(says, str(error))
    with pytest.raises(JoinRefused, match=says):
        first.take(1)
    assert str(served.stats.read().error).startswith(
        "JoinRefused: rank 2 of attempt 'a' was refused"
    )
    assert served.coordinator.not_ready() is None
    Trainer(served, resume="latest").train(3)


def test_a_rank_that_is_refused_before_the_others_join_keeps_the_launch_from_opening(
    served: ServedRun, in_thread: Any
) -> None:
    running = Trainer(served)
    running.train(1)
    before = in_thread(lambda: served.join_handler.join(call_of(2, 3, resume="latest")))
    with pytest.raises(JoinRefused, match="accumulate"):
        served.join_handler.join(call_of(1, 3, accumulate=10**6, resume="latest"))
    assert isinstance(before(2.0), JoinRefused)
    with pytest.raises(
        JoinRefused,
        match="rank 1 of attempt 'a' was refused, so its launch cannot begin: accumulate",
    ):
        served.join_handler.join(call_of(0, 3, resume="latest"))
    running.train(3)
    # All of them know: who comes again under the same id tries anew.
    again = in_thread(lambda: served.join_handler.join(call_of(1, 3, resume="latest")))
    served.join_handler.join(call_of(0, 3, resume="latest"))
    assert again().opening.generation == 2


def test_a_rank_that_is_refused_while_rank_0_is_at_the_opening_keeps_it_from_being_written(
    place: Place, served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ResumePoints.forward

    def refused_meanwhile(*args: Any, **options: Any) -> Any:
        with pytest.raises(SnapshotInvalid):
            served.join_handler.join(call_of(1, state=b"{"))
        return forward(*args, **options)

    monkeypatch.setattr(ResumePoints, "forward", refused_meanwhile)
    with pytest.raises(SnapshotInvalid, match="rank 1 of attempt 'a' was refused"):
        served.join_handler.join(call_of(0))
    assert place.stored().opening is None


def test_a_process_that_is_refused_a_place_which_another_one_has_disturbs_nobody(
    served: ServedRun,
) -> None:
    trainer = Trainer(served)
    trainer.train(1)
    for rank, world_size in ((0, 2), (1, 2), (2, 3), (7, 2)):
        # Not that they disagree, which the same process could mend.
        with pytest.raises(AttemptUsed if rank < 2 else JoinRefused):
            served.join_handler.join(call_of(rank, world_size, 4, trainer.attempt, nonce="another"))
    trainer.train(3)
    assert served.coordinator.view().error is None


def test_the_way_to_a_far_sample_is_said_on_both_sides_and_not_begun_where_the_data_end_before(
    place: Place,
    served: ServedRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(replay, "TURN_TOKENS", 80)
    monkeypatch.setattr(resume_points, "FAR_SAMPLES", 1000)
    monkeypatch.setattr(client_join, "SOON_S", 0.01)
    monkeypatch.setattr(client_join, "WATCH_EVERY_S", 5)
    caplog.set_level(logging.INFO)
    heard, turn = threading.Event(), replay.Replay.turn

    def hear(record: logging.LogRecord) -> bool:
        if "the server goes forward" in record.getMessage():
            heard.set()
        return True

    def slow_turn(going: replay.Replay, index: int) -> None:
        turn(going, index)
        assert heard.wait(60), "the client says nothing"

    monkeypatch.setattr(replay.Replay, "turn", slow_turn)
    monkeypatch.setattr(logging.getLogger("tokenloom"), "filters", [hear])
    server = GrpcServer("127.0.0.1:0")
    server.start(place.runs)
    url = f"grpc://{server.address}/{served.coordinator.name}"
    try:
        with RemoteDataset(url, 1) as dataset:
            dataset.load_state_dict({"sample_index": 35})
            iter(dataset)
            assert dataset.sample_index == 35
        for says in ("going forward", "the server goes forward"):
            assert f"{says} from sample 0 to 35: at sample 0" in caplog.text
        assert served.stats.read().going_forward == ""
        with RemoteDataset(url, 1, launch=LaunchOptions(takeover=True)) as dataset:
            dataset.load_state_dict({"sample_index": 10**12})
            with pytest.raises(
                SnapshotInvalid,
                match=f"at sample {10**12}, but the data end at about sample [0-9]+ ",
            ):
                iter(dataset)
    finally:
        server.stop(0.1)


@pytest.mark.parametrize("kind", [NumpyDataset, RemoteDataset])
def test_each_dataset_of_a_slurm_task_has_an_attempt_and_none_meets_another_launch_of_the_step(
    place: Place,
    served: ServedRun,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[NumpyDataset] | type[RemoteDataset],
) -> None:
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    topology.joins.cache_clear()
    server = GrpcServer("127.0.0.1:0")
    server.start(place.runs)

    def made() -> list[Any]:
        """A dataset on each task."""
        datasets = []
        for rank in range(2):
            monkeypatch.setenv("SLURM_PROCID", str(rank))
            connection = ConnectionOptions(connect_timeout_s=5, reconnect_timeout_s=5)
            url = f"grpc://{server.address}/{served.coordinator.name}"
            datasets.append(
                kind(
                    url,
                    1,
                    resume="latest",
                    launch=LaunchOptions(takeover=True),
                    connection=connection,
                )
            )
        return datasets

    def trained(datasets: list[Any]) -> str:
        batches = [next(iter(dataset)) for dataset in datasets]
        assert abs(int(batches[1]["sample_ids"][0]) - int(batches[0]["sample_ids"][0])) == 1
        opening = place.written().opening
        assert opening is not None
        return opening.attempt

    try:
        # One after another, two that were made at once, one that nobody reads, one after close().
        first, second, unread = made(), made(), made()
        attempts = [trained(first), trained(copy.deepcopy(second))]
        late = made()
        attempts.append(trained(late))
        for dataset in (*first, *second, *unread, *late):
            dataset.close()
        closed = made()
        attempts.append(trained(closed))
        assert attempts == [
            "slurm-77-0-0-train",
            *(f"slurm-77-0-0-train-{number}" for number in (1, 2, 3)),
        ]
        stopped = made()[1]  # before it joins
        # Started again within the step: whatever is asked first, and however much is made, it is not guessed.
        with monkeypatch.context() as patch:
            topology.joins.cache_clear()
            again = [*made(), *made()]
            for dataset in again:
                says = (
                    "opened generation 1 already"
                    if dataset.rank
                    else "attempt=.*again within a SLURM job step"
                )
                with pytest.raises(AttemptUsed, match=says):
                    iter(dataset)
            patch.setenv("SLURM_RESTART_COUNT", "1")
            requeued = made()
            assert trained(requeued) == "slurm-77-0-1-train"
        with pytest.raises(
            JoinRefused, match="waited 0 s for rank 0 of attempt 'slurm-77-0-0-train-4'"
        ):
            monkeypatch.setattr("tokenloom_server.run.join.RANK_0_WAIT_S", 0.05)
            iter(stopped)
        for dataset in closed:
            with pytest.raises(Fenced):
                for _ in iter(dataset):
                    pass
        for dataset in (*closed, stopped, *again, *requeued):
            dataset.close()
    finally:
        server.stop(0.1)


@pytest.mark.parametrize("lost", [False, True])
def test_what_moves_no_sample_may_change_between_launches_and_is_said_in_log_and_stats(
    place: Place, trainer: Trainer, lost: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.train(2)
    state = trainer.state()
    place.stop()
    document = yaml.safe_load(place.path.read_text())
    named = document["mixture"] | {"alias": "another"}
    place.path.write_text(yaml.safe_dump(document | {"mask_boundaries": True, "mixture": named}))
    served = place.serve(tmp_path / "another.db" if lost else None)
    Trainer(served, state=state).train(1)
    said = 'mask_boundaries: was false, the file has true now; mixture: alias: was nothing, the file has "another" now'
    assert all(caplog.messages.count(f"test: {part}") == 1 for part in said.split("; "))
    assert served.stats.read().warning == said
    # What the order depends on is refused with both values wherever it is known from.
    place.stop()
    weight = {
        "children": [
            document["mixture"]["children"][0] | {"weight": 3},
            *document["mixture"]["children"][1:],
        ]
    }
    for number, (change, says) in enumerate(
        (
            (
                {"mixture": document["mixture"] | weight},
                'weight: the run began with "2", the file has "3"',
            ),
            (
                {"phases": [{"until_tokens": 10**6}]},
                r'phases: the run began with \[\], the file has \[{"until_tokens": 1',
            ),
        )
    ):
        place.path.write_text(yaml.safe_dump(document | change))
        with pytest.raises((ConfigError, SnapshotInvalid), match=says):
            Trainer(place.serve(tmp_path / f"{number}.db" if lost else None), state=state)
        place.stop()


def test_more_ranks_than_may_have_connections_are_said_in_the_log(
    place: Place, served: ServedRun, caplog: pytest.LogCaptureFixture
) -> None:
    server = GrpcServer("127.0.0.1:0", max_connections=3)
    server.start(place.runs)
    try:
        for world_size in (3, 4):
            assert "connections at a time" not in caplog.text
            address = f"grpc://{server.address}/{served.coordinator.name}"
            with RemoteDataset(
                address,
                1,
                rank=0,
                world_size=world_size,
                launch=LaunchOptions(attempt=f"of {world_size}"),
            ) as dataset:
                next(iter(dataset))
        assert "4 ranks join, and this server may have 3 connections at a time" in caplog.text
    finally:
        server.stop(0.1)

"""A run at work, without a socket: real files, a real SQLite ledger, ranks that keep what they got."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import pytest
import yaml
from support.corpora import CODE, WIKI, encode_state, flat, mixture, write_corpus
from tokenloom.snapshot import Base, History, Point
from tokenloom_proto.seal import canonical, seal, unseal
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    AttemptUsed,
    BeyondHorizon,
    ConfigError,
    Fenced,
    JoinRefused,
    LedgerRolledBack,
    LedgerUnavailable,
    LimitExceeded,
    NotFound,
    NotLeader,
    OrderMismatch,
    RankStalled,
    ResumePointNeeded,
    RunBusy,
    ServerStopping,
    SnapshotInvalid,
    SourceError,
)
from tokenloom_server.ledger.records import Commit, StoredRevision, StoredRun
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.order.pipeline import BatchPlan, Pipeline
from tokenloom_server.replay.peek import PeekCall
from tokenloom_server.run.commits import commit_of, resume_state_of
from tokenloom_server.run.delivery import Delivery, EndOfData, Waiting
from tokenloom_server.run.join import Joined
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.sizing import steps_of
from tokenloom_server.run.timeouts import Timeouts
from tokenloom_server.run.views import Session

RUN = "test"
PATIENCE_S = 20.0
T = TypeVar("T")


class Sample(NamedTuple):
    source: int
    ids: bytes


#: A batch size, or pairs (total tokens, batch size).
Sizes: TypeAlias = int | tuple[tuple[int, int], ...]
#: Samples have 8 tokens: 2 at first, 5 from sample 30 on, 1 from 100 on.
RAMP = ((0, 2), (240, 5), (800, 1))


class Step(NamedTuple):
    """One step of one rank, as it travels."""

    begin: int
    end: int
    samples: dict[int, Sample]
    point: Point


def never() -> bool:
    return False


class Rank:
    """A client of one slot, which keeps the points that it was at as the real one does."""

    def __init__(self, served: ServedRun, call: JoinCall, loaded: Any = None) -> None:
        self.served = served
        self.call = call
        self.joined: Joined = served.join_handler.join(call)
        opening, start = self.joined.opening, self.joined.start
        base = Base(start.sample_index, opening.start_state.encode())
        point = Point(start.sample_index, start.total_tokens, f"{start.digest:032x}", base)
        template = canonical(
            served.coordinator.order.record.template(self.joined.uid, "train", opening.generation)
        ).encode()
        self.history = History(template, point, loaded)
        self.base = base
        self.buffer: deque[Step] = deque()
        self.received = self.consumed = opening.start_index
        self.committed_seen = 0
        self.taken: dict[int, Sample] = {}
        self.end: EndOfData | None = None
        self.session = self.connect(served)

    def connect(self, served: ServedRun, credit_steps: int = 1000) -> Session:
        """A new stream, perhaps to another server: it goes on behind what was received."""
        self.served = served
        coordinator = served.coordinator
        opening = self.joined.opening
        self.session = coordinator.attach(
            self.joined.uid, opening.generation, self.call.rank, self.call.nonce, self.received, self.committed_seen
        )
        self.end = None
        coordinator.progress(self.session, self.consumed, credit_steps)
        return self.session

    def receive(self) -> bool:
        """One message; False at the end of data."""
        coordinator = self.served.coordinator
        found = coordinator.next_for(self.session, PATIENCE_S, never)
        assert not isinstance(found, Waiting), found.waiting_for
        if isinstance(found, EndOfData):
            self.end = found
            return False
        self.keep(found)
        self.committed_seen = max(self.committed_seen, coordinator.committed_through)
        return True

    def keep(self, found: Delivery) -> None:
        group = found.group
        rank, batch = self.call.rank, group.plan.batch_size
        if found.with_base:
            self.base = Base(group.begin, resume_state_of(self.served.coordinator.timeline, group).encode())
        assert self.base.sample_index == group.begin
        for step in range(found.first, found.last):
            mark, begin = group.marks[step], group.step_begin(step)
            assert begin == self.received
            at = begin + group.slice_of(step, rank) * batch
            samples = {
                at + i: Sample(int(group.source_ids[rank, step, i]), group.ids(rank, step, step + 1)[i].tobytes())
                for i in range(batch)
                if group.source_ids[rank, step, i] >= 0
            }
            point = Point(mark.sample_index, mark.total_tokens, f"{mark.digest:032x}", self.base)
            self.buffer.append(Step(begin, mark.sample_index, samples, point))
            self.received = mark.sample_index

    def take(self, steps: int) -> int:
        """Consumes steps one by one; returns how many there were before the data ended."""
        for count in range(steps):
            while not self.buffer:
                if not self.receive():
                    return count
            step = self.buffer.popleft()
            assert not self.taken.keys() & step.samples.keys()
            self.taken |= step.samples
            self.history.append(step.point)
            self.consumed = step.end
            self.served.coordinator.progress(self.session, self.consumed, 1000)
        return steps

    def state(self, at: int | None = None) -> bytes:
        return self.history.text(at).encode()


class Trainer:
    """All ranks of one launch, in step."""

    attempts = 0

    def __init__(self, served: ServedRun, world_size: int = 2, batch_size: Sizes = 2, **ask: Any) -> None:
        Trainer.attempts += 1
        self.attempt = f"attempt-{Trainer.attempts}"
        self.ranks = [
            Rank(served, call_of(rank, world_size, batch_size, self.attempt, **ask)) for rank in range(world_size)
        ]

    def take(self, steps: int) -> dict[int, Sample]:
        """The samples of the next steps, by index; every rank ends at the same step."""
        counts = set()
        before = len(self.taken())
        for _ in range(steps):
            counts = {rank.take(1) for rank in self.ranks}
            assert len(counts) == 1
            if counts == {0}:
                break
        return dict(sorted(self.taken().items())[before:])

    def taken(self) -> dict[int, Sample]:
        found: dict[int, Sample] = {}
        for rank in self.ranks:
            assert not found.keys() & rank.taken.keys()
            found |= rank.taken
        return found

    def settle(self) -> None:
        """Until all that was consumed is committed."""
        self.ranks[0].served.coordinator.finish(self.ranks[0].session, PATIENCE_S)

    def state(self, at: int | None = None) -> bytes:
        found = {rank.state(at) for rank in self.ranks}
        assert len(found) == 1, "ranks wrote different states"
        return found.pop()

    @property
    def index(self) -> int:
        return self.ranks[0].consumed


def call_of(rank: int = 0, world_size: int = 2, batch_size: Sizes = 2, attempt: str = "a", **ask: Any) -> JoinCall:
    fields: dict[str, Any] = {"resume": "", "state": b"", "nonce": f"{attempt}-nonce-{rank}"}
    if not isinstance(batch_size, int):
        fields["batch_sizes"], batch_size = batch_size, 0
    return JoinCall(rank=rank, world_size=world_size, batch_size=batch_size, attempt=attempt, **(fields | ask))


class Place:
    """A folder with a corpus, a mixture file and a ledger; servers come and go."""

    def __init__(self, folder: Path, ledger_folder: Path, document: dict[str, Any]) -> None:
        self.path = folder / f"{ledger_folder.name}.yaml"
        self.path.write_text(yaml.safe_dump(document))
        self.ledger_path = ledger_folder / "ledger.db"
        #: Without liveness, a new attempt need not wait for the one before to be silent.
        self.timeouts = Timeouts(liveness_s=0.0)
        self.wrap: Callable[[SqliteLedger], SqliteLedger] = lambda ledger: ledger
        self._up: list[tuple[Runs, SqliteLedger]] = []

    def serve(self, ledger_path: Path | None = None) -> ServedRun:
        """A server comes up (beside one that may still be there)."""
        ledger = self.wrap(SqliteLedger(ledger_path or self.ledger_path))
        # One holder for all: a server that comes up beside another is taken for that one's restart, and leads at once.
        runs = Runs(ledger, "one", self.timeouts)
        self._up.append((runs, ledger))
        self.runs = runs
        return runs.add(self.path, None)

    def stop(self) -> None:
        for runs, ledger in self._up:
            runs.stop()
            ledger.close()
        self._up.clear()

    def restart(self) -> ServedRun:
        self.stop()
        return self.serve()

    def stored(self) -> StoredRun:
        found = self._up[-1][1].read_run(RUN, "train")
        assert found is not None
        return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("served"))


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Iterator[Place]:
    made = Place(folder, tmp_path, mixture(window_steps=6))
    yield made
    made.stop()


@pytest.fixture
def made(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(**fields: Any) -> Place:
        places.append(Place(folder, tmp_path, mixture(**({"window_steps": 6} | fields))))
        return places[-1]

    yield make
    for place in places:
        place.stop()


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """State boundaries every few steps, as they are with real sample sizes."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 4)


def test_a_group_has_the_more_messages_the_more_its_state_costs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(folder, tmp_path, mixture())
    try:
        coordinator = place.serve().coordinator
        message = coordinator.message_steps(2)
        assert coordinator.group_steps(2, 2) == message
        monkeypatch.setattr("tokenloom_server.run.sizing.SOURCES_PER_MESSAGE", 2)
        assert coordinator.group_steps(2, 2) == (1 + len(coordinator.order.record.specs) // 2) * message
        # Many ranks: less than one message for each, but a step at least.
        monkeypatch.setattr("tokenloom_server.run.sizing.GROUP_BYTES", 3 * 64 * 2 * coordinator.order.form.sample_bytes)
        assert [coordinator.group_steps(64, 2), coordinator.group_steps(10_000, 2)] == [3, 1]
    finally:
        place.stop()


def sequence(served: ServedRun) -> list[Sample]:
    """The canonical order, straight from the pipeline."""
    order = served.coordinator.order
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(BatchPlan(start_index=0, world_size=1, batch_size=1, group_steps=1000))
    pipeline.fill(group, 1000)
    assert pipeline.ended is not None
    return [
        Sample(int(group.source_ids[0, step, 0]), group.ids(0, step, step + 1)[0].tobytes())
        for step in range(len(group.marks))
    ]


def part(samples: list[Sample], begin: int, end: int) -> dict[int, Sample]:
    return {index: samples[index] for index in range(begin, end)}


# --- opening ---------------------------------------------------------------------------------------


def test_rank_0_opens_with_one_write_and_the_others_join_it(place: Place) -> None:
    served = place.serve()
    assert place.stored().opening is None
    first = served.join_handler.join(call_of(0))
    stored = place.stored()
    assert stored.opening == first.opening
    assert (first.opening.generation, first.opening.parent, first.opening.start_index) == (1, 0, 0)
    assert stored.committed is not None
    assert (stored.committed.sample_index, stored.committed.digest) == (0, "0" * 32)
    assert served.join_handler.join(call_of(1)) == first
    assert place.stored() == stored


def test_a_rank_that_comes_first_waits_for_rank_0(place: Place) -> None:
    served = place.serve()
    found: list[Joined] = []
    thread = threading.Thread(target=lambda: found.append(served.join_handler.join(call_of(1))))
    thread.start()
    thread.join(0.1)
    assert not found
    first = served.join_handler.join(call_of(0))
    thread.join(PATIENCE_S)
    assert found == [first]


def test_a_waiting_rank_hears_why_rank_0_was_refused(place: Place) -> None:
    served = place.serve()
    errors: list[Exception] = []

    def join() -> None:
        try:
            served.join_handler.join(call_of(1, resume="nothing-of-that-name"))
        except NotFound as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(NotFound):
        served.join_handler.join(call_of(0, resume="nothing-of-that-name"))
    thread.join(PATIENCE_S)
    assert "nothing-of-that-name" in str(errors[0])
    # What was refused once may be mended, under the same attempt; a rank that comes before rank 0 waits for it.
    later: list[Joined] = []
    thread = threading.Thread(target=lambda: later.append(served.join_handler.join(call_of(1))))
    thread.start()
    thread.join(0.05)
    served.join_handler.join(call_of(0))
    thread.join(PATIENCE_S)
    assert later[0].opening.generation == 1
    assert served.join_handler.join(call_of(1)).opening.generation == 1


def test_a_waiting_rank_hears_that_the_server_stops(place: Place) -> None:
    served = place.serve()
    errors: list[Exception] = []

    def join() -> None:
        try:
            served.join_handler.join(call_of(1))
        except ServerStopping as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join(0.05)
    served.coordinator.stop()
    thread.join(PATIENCE_S)
    assert errors


def test_waiting_for_rank_0_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom_server.run.join.RANK_0_WAIT_S", 0.05)
    with pytest.raises(JoinRefused, match="rank 1 waited 0 s for rank 0 of attempt 'a'"):
        place.serve().join_handler.join(call_of(1))


def test_the_same_process_may_ask_again(place: Place) -> None:
    served = place.serve()
    first = served.join_handler.join(call_of(0))
    assert served.join_handler.join(call_of(0)) == first
    assert place.restart().join_handler.join(call_of(0)).opening == first.opening
    assert place.stored().opening == first.opening


def test_another_process_on_a_slot_needs_a_new_attempt(place: Place) -> None:
    served = place.serve()
    served.join_handler.join(call_of(0))
    served.join_handler.join(call_of(1))
    for rank in (0, 1):
        with pytest.raises(AttemptUsed):
            served.join_handler.join(call_of(rank, nonce="another"))
    # Nothing of that hurts those that are there.
    served.join_handler.join(call_of(0))
    served.join_handler.join(call_of(1))


def test_an_attempt_id_opens_once(place: Place) -> None:
    served = place.serve()
    served.join_handler.join(call_of(0, attempt="one"))
    served.join_handler.join(call_of(0, attempt="two"))
    for rank in (0, 1):
        with pytest.raises(AttemptUsed, match="one"):
            served.join_handler.join(call_of(rank, attempt="one"))
    again = place.restart()
    for rank in (0, 1):
        with pytest.raises(AttemptUsed, match="one"):
            again.join_handler.join(call_of(rank, attempt="one"))
    assert place.stored().opening is not None
    assert served.coordinator.view().generation.number


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"world_size": 3}, "rank 1 has world size 3, but rank 0 of attempt 'a' opened it with 2"),
        ({"batch_size": 4}, "rank 1 has batch size 4, but rank 0 of attempt 'a' opened it with 2"),
        ({"batch_size": RAMP}, "rank 1 has batch size 2, 5 from 240 total tokens on, 1 from 800 .* opened it with 2$"),
        ({"accumulate": 2}, "rank 1 has accumulate 2, but rank 0 of attempt 'a' opened it with 1"),
        ({"resume": "latest"}, "rank 1 resumes from resume='latest', but rank 0 of attempt 'a' from no state"),
    ],
)
def test_a_rank_that_disagrees_is_refused_with_both_values(place: Place, fields: dict[str, Any], says: str) -> None:
    served = place.serve()
    served.join_handler.join(call_of(0))
    with pytest.raises(JoinRefused, match=says):
        served.join_handler.join(call_of(1, **fields))
    # Rank 0 once more, from a process that disagrees with itself, spoils nothing for the others.
    with pytest.raises(JoinRefused):
        served.join_handler.join(replace(call_of(1, **fields), rank=0, nonce="a-nonce-0"))
    served.join_handler.join(call_of(1))


def test_ranks_with_different_states_are_refused_also_after_a_restart(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(3)
    late, early = trainer.state(), trainer.state(4)
    trainer.settle()
    served.join_handler.join(call_of(0, attempt="b", state=late))
    for _ in range(2):
        with pytest.raises(JoinRefused, match=r"a loaded state at sample 4 .* sample 12 .*same checkpoint on every"):
            served.join_handler.join(call_of(1, attempt="b", state=early))
        served = place.restart()
    served.join_handler.join(call_of(1, attempt="b", state=late))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rank": 2}, "rank 2 is not below the world size 2"),
        ({"world_size": 0}, "world size is 0"),
        ({"world_size": 4097}, "world size is 4097; expected 1 to 4096"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"batch_size": 2**20 + 1}, "batch size is 1048577"),
        (
            {"batch_sizes": RAMP},
            "batch size is 2 and also a schedule, 2, 5 from 240 total tokens on, .*: give one of them",
        ),
        ({"batch_size": ((8, 2),)}, "begins at 8 total tokens; expected 0"),
        (
            {"world_size": 100, "batch_size": ((0, 2), (8, 2**20))},
            r"a step of 100 ranks × 1048576 samples × 16 bytes has .*; expected at most",
        ),
        ({"batch_size": 2**18, "accumulate": 1025}, "accumulate is 1025, and so many steps of 8388608 bytes have"),
        ({"accumulate": 0}, "accumulate is 0; expected 1 to"),
        ({"accumulate": 4}, "accumulate is 4, but window_steps in the mixture file is 6; expected at least 8"),
        ({"attempt": ""}, "attempt has 0 characters"),
        ({"attempt": "a" * 257}, "attempt has 257 characters"),
        ({"nonce": ""}, "nonce has 0 characters"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(place: Place, fields: dict[str, Any], says: str) -> None:
    served = place.serve()
    with pytest.raises(JoinRefused, match=says):
        served.join_handler.join(call_of(**({"rank": 0} | fields)))
    assert place.stored().opening is None


# --- resume points ---------------------------------------------------------------------------------


def test_progress_and_nothing_to_resume_from_is_refused_with_the_choices(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(2)
    trainer.settle()
    with pytest.raises(ResumePointNeeded) as caught:
        Trainer(served)
    for word in ("sample 8", "load_state_dict", "resume='latest'", "resume='fresh'", "snapshot id"):
        assert word in str(caught.value)
    # The generation that is there goes on.
    trainer.take(1)


@pytest.mark.parametrize("restart", [False, True])
def test_every_resume_point_gives_exactly_what_follows_it(place: Place, restart: bool) -> None:
    served = place.serve()
    samples = sequence(served)
    trainer = Trainer(served)
    assert trainer.take(7) == part(samples, 0, 28)
    state = trainer.state(12)
    _, saved = place.runs.get(RUN).snapshots.take(17, save=True)
    trainer.take(2)
    trainer.settle()
    for ask, begin in (
        ({"resume": "latest"}, 36),
        ({"state": state}, 12),
        ({"resume": saved}, 17),
        ({"resume": "fresh"}, 0),
        ({"state": state}, 12),
    ):
        if restart:
            served = place.restart()
        trainer = Trainer(served, world_size=3, batch_size=1, **ask)
        assert trainer.index == begin
        stored = place.stored()
        assert stored.committed is not None
        assert stored.committed.sample_index == begin
        assert trainer.take(4) == part(samples, begin, begin + 12)
        if ask == {"resume": "latest"}:
            trainer.settle()
            trainer = Trainer(served, resume="latest")
            assert trainer.index == 48


def test_latest_of_a_run_that_never_began_is_sample_0(place: Place) -> None:
    assert Trainer(place.serve(), resume="latest").index == 0


def test_an_unknown_snapshot_id_is_refused_with_those_that_there_are(place: Place) -> None:
    served = place.serve()
    with pytest.raises(NotFound, match=r"resume='9-abc': run 'test' has no snapshot of that id \(newest: none"):
        Trainer(served, resume="9-abc")
    Trainer(served).take(1)
    _, saved = place.runs.get(RUN).snapshots.take(None, save=True)
    with pytest.raises(NotFound, match=str(saved)):
        Trainer(served, resume="9-abc")


def test_a_state_and_a_resume_point_together_are_refused(place: Place) -> None:
    served = place.serve()
    with pytest.raises(JoinRefused, match="brings a loaded state and resume='latest': give one of them"):
        Trainer(served, state=Trainer(served).state(), resume="latest")


def test_a_state_before_the_first_batch_is_sample_0_of_the_generation(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    text = trainer.state().decode()
    assert text == served.history.snapshot(0)[0]
    assert Trainer(served, state=text.encode()).index == 0


def test_a_state_of_another_run_is_refused(place: Place, tmp_path: Path) -> None:
    trainer = Trainer(place.serve())
    trainer.take(2)
    state = trainer.state()
    elsewhere = place.serve(tmp_path / "elsewhere.db")
    Trainer(elsewhere)
    with pytest.raises(SnapshotInvalid, match=r"the state is of run_uid .* and has progress of its own"):
        Trainer(elsewhere, state=state)


def test_an_empty_ledger_adopts_the_trainers_run(place: Place, tmp_path: Path) -> None:
    served = place.serve()
    samples = sequence(served)
    Trainer(served)
    trainer = Trainer(served)
    trainer.take(5)
    state, uid = trainer.state(), served.coordinator.uid
    place.stop()
    elsewhere = place.serve(tmp_path / "elsewhere.db")
    assert elsewhere.coordinator.uid != uid
    moved = Trainer(elsewhere, world_size=1, batch_size=3, state=state)
    assert (elsewhere.coordinator.uid, place.stored().uid) == (uid, uid)
    # Above every generation that the old ledger had when the state was taken.
    assert moved.ranks[0].joined.opening.generation == 3
    assert moved.take(9) == part(samples, 20, 47)
    moved.settle()
    assert elsewhere.history.snapshot(33)[0].encode() != moved.state()
    assert elsewhere.history.snapshot(47)[0].encode() == moved.state()
    with pytest.raises(BeyondHorizon, match="sample 19 lies before the first state"):
        elsewhere.history.snapshot(19)


def changed(state: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = unseal(state)
    change(document)
    return seal(document).encode()


def test_a_state_that_going_forward_does_not_meet_is_refused_before_anything_changes(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(3)
    state = trainer.state()
    trainer.settle()
    before = place.stored()
    faults: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
        ("gives digest", lambda d: d.update(digest="1" * 32)),
        ("gives digest", lambda d: d["resume_state"].update(digest="1" * 32)),
        ("data end at sample", lambda d: d.update(sample_index=10**6, total_tokens=8 * 10**6)),
        ("row_offset|rows", lambda d: d["resume_state"]["datasets"][0].update(row_offset=10**9)),
        ("token 99999 of row", lambda d: d["resume_state"]["datasets"][0].update(row_token_offset=99999)),
    ]
    for says, change in faults:
        for ask in (changed(state, change), changed(trainer.state(8), change)):
            with pytest.raises((SnapshotInvalid, SourceError), match=says):
                Trainer(served, state=ask)
            with pytest.raises((SnapshotInvalid, SourceError), match=says):
                place.runs.get(RUN).start_points.restore(text=ask.decode())
    assert place.stored() == before
    trainer.take(1)


def test_a_cursor_behind_the_files_is_refused_also_where_there_is_nothing_to_go_forward(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(4)
    # A state at a boundary, as a server's opening holds it.
    state = Trainer(served, state=trainer.state()).state()
    document = json.loads(state)
    assert document["sample_index"] == 16
    at_boundary = encode_state(served.coordinator.order, served.history.forward(served.history.parse(state)))
    document["resume_state"] = json.loads(at_boundary)
    document.pop("checksum")
    assert served.history.parse(seal(document)).base is not None
    before = place.stored()
    for field, value in (("row_offset", 15), ("row_offset", 2**53 - 1), ("epoch", 9)):
        damaged = json.loads(canonical(document))
        damaged["resume_state"]["datasets"][0][field] = value
        with pytest.raises(SnapshotInvalid, match=f"resume_state.datasets.0: {field} is {value}"):
            Trainer(served, state=seal(damaged).encode())
    assert place.stored() == before


# --- restores --------------------------------------------------------------------------------------


def test_a_restore_pins_the_next_resume_point(place: Place) -> None:
    served = place.serve()
    samples = sequence(served)
    trainer = Trainer(served)
    trainer.take(6)
    state = trainer.state(12)
    trainer.settle()
    assert place.runs.get(RUN).start_points.restore(sample_index=9).sample_index == 9
    # The generation that is there goes on; the pin survives a restart of the server.
    trainer.take(1)
    served = place.restart()
    with pytest.raises(JoinRefused, match=r"a restore pinned sample 9 .* but rank 0 resumes from sample 12"):
        Trainer(served, state=state)
    with pytest.raises(JoinRefused, match="a restore pinned sample 9"):
        Trainer(served, resume="fresh")
    pinned = Trainer(served)
    assert pinned.take(2) == part(samples, 9, 17)
    assert place.stored().pin is None
    place.runs.get(RUN).start_points.restore(text=state.decode())
    assert Trainer(served, state=state).index == 12


def consumed_and_skipped(place: Place) -> dict[str, tuple[int, int, int, int]]:
    """By spec: samples and rows that the ledger counts, and those that are told as skipped."""
    committed = place.stored().committed
    assert committed is not None
    return {
        source.spec: (
            committed.counters[source.spec].samples,
            committed.counters[source.spec].rows,
            source.skipped_samples,
            source.skipped_rows,
        )
        for source in place.runs.get(RUN).stats.read().sources
    }


@pytest.mark.parametrize("end", [10, 60, 61, 100, 174])
def test_any_range_behind_any_point_can_be_skipped(place: Place, end: int) -> None:
    served = place.serve()
    samples = sequence(served)
    order = served.coordinator.order
    trainer = Trainer(served)
    trainer.take(44)
    trainer.settle()
    for begin in {0, end // 3, end - 1}:
        point = place.runs.get(RUN).start_points.restore(sample_index=begin, skip_samples=end - begin)
        assert (point.sample_index, point.skipped_samples, point.start_index) == (begin, end - begin, end)
        behind = Trainer(served, world_size=1, batch_size=1)
        opening = behind.ranks[0].joined.opening
        assert (opening.start_index, opening.skipped) == (end, end - begin)
        assert behind.take(1000) == part(samples, end, 175)
        behind.settle()
        states = []
        for at in (begin, end, 175):
            pipeline = order.pipeline(order.initial())
            pipeline.advance(at)
            states.append(pipeline.state().sources)
        assert behind.ranks[0].history.last.digest == digest_hex(pipeline.state().digest)
        for spec, before, after, last in zip(order.record.specs, *states, strict=True):
            skipped = after.samples - before.samples, after.rows - before.rows
            assert consumed_and_skipped(place)[spec] == (last.samples - skipped[0], last.rows - skipped[1], *skipped)
        # The generation's own snapshots carry it on, whichever index they are at.
        text, _ = served.history.snapshot(min(end + 3, 175))
        counted = {entry["spec"]: entry.get("skipped_samples", 0) for entry in datasets(text)}
        assert sum(counted.values()) == end - begin


def datasets(text: str) -> Any:
    return json.loads(text)["resume_state"]["datasets"]


def test_ranks_whose_state_stands_before_a_skip_agree_also_after_a_restart(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(3)
    late, early = trainer.state(), trainer.state(4)
    trainer.settle()
    place.runs.get(RUN).start_points.restore(text=late.decode(), skip_samples=5)
    served.join_handler.join(call_of(0, attempt="b", state=late))
    for _ in range(2):
        with pytest.raises(JoinRefused, match=r"a loaded state at sample 4 .* sample 12 .*same checkpoint on every"):
            served.join_handler.join(call_of(1, attempt="b", state=early))
        served = place.restart()
    joined = served.join_handler.join(call_of(1, attempt="b", state=late))
    assert (joined.opening.start_index, joined.opening.skipped) == (17, 5)
    # The launch after it, from a state of its own, jumps over nothing.
    with pytest.raises(BeyondHorizon, match="4000 samples after sample 12 cannot be skipped: the data end at sample"):
        place.runs.get(RUN).start_points.restore(sample_index=12, skip_samples=4000)
    with pytest.raises(LimitExceeded, match="one restore goes forward through"):
        place.runs.get(RUN).start_points.restore(sample_index=12, skip_tokens=2**35)
    with pytest.raises(ConfigError, match="a restore skips 1 samples and 1 tokens: give one of them"):
        place.runs.get(RUN).start_points.restore(sample_index=12, skip_samples=1, skip_tokens=1)
    assert served.join_handler.join(call_of(0, attempt="c", state=late)).opening.start_index == 12


def test_a_peek_does_not_take_its_states_from_a_line_that_was_left(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(10)
    trainer.settle()
    call = PeekCall(rank=0, world_size=1, batch_size=1, resume="60", state=b"")
    assert sum(source.skipped_samples for source in served.peeks.join(call, never).state.sources) == 0
    place.runs.get(RUN).start_points.restore(sample_index=20, skip_samples=10)
    Trainer(served).take(1)
    again = served.peeks.join(call, never)
    assert (again.generation, again.state.sample_index) == (2, 60)
    assert sum(source.skipped_samples for source in again.state.sources) == 10


def test_a_restore_names_one_point_that_exists(place: Place) -> None:
    Trainer(place.serve()).take(1)
    for point in ({}, {"snapshot_id": "a", "sample_index": 1}, {"text": "{}", "sample_index": 1}):
        with pytest.raises(ConfigError, match="names one of snapshot id, sample index and snapshot"):
            place.runs.get(RUN).start_points.restore(**point)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        place.runs.get(RUN).start_points.restore(snapshot_id="none")
    with pytest.raises(BeyondHorizon):
        place.runs.get(RUN).start_points.restore(sample_index=10**6)
    with pytest.raises(SnapshotInvalid):
        place.runs.get(RUN).start_points.restore(text="{}")
    assert place.stored().pin is None


# --- snapshots at any index ------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [2, RAMP])
@pytest.mark.parametrize("last_step", ["drop", "pad"])
def test_a_snapshot_at_every_index_is_what_a_client_writes_there_before_and_after_a_restart(
    made: Callable[..., Place], last_step: str, batch_size: Sizes
) -> None:
    place = made(last_step=last_step)
    served = place.serve()
    trainer = Trainer(served, world_size=3, batch_size=batch_size)
    written = {0: trainer.state()}
    fresh: dict[int, str] = {}
    while trainer.take(1):
        written[trainer.index] = trainer.state()
        # In memory: what was produced and not yet dropped.
        for index in range(trainer.index, trainer.index + 7):
            if index <= 174 - (last_step == "drop" and batch_size is RAMP):
                fresh.setdefault(index, served.history.snapshot(index)[0])
    trainer.settle()
    assert list(written)[-1] == (175 if last_step == "pad" else 174)
    for index, text in written.items():
        assert served.history.snapshot(index) == (text.decode(), index)
        if index in fresh:
            assert fresh[index] == text.decode()
    assert served.history.snapshot(None)[0] == trainer.state().decode()
    # Indices within a step, too: no client stands there, but a restore may.
    every = [served.history.snapshot(index)[0] for index in range(0, 175, 7)]
    again = place.restart()
    for index, text in list(written.items())[::3]:
        assert again.history.snapshot(index) == (text.decode(), index)
    assert [again.history.snapshot(index)[0] for index in range(0, 175, 7)] == every


def going_forward_from(served: ServedRun, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the sample index of each state that a pipeline is made from."""
    found: list[int] = []
    make = served.coordinator.timeline.pipeline

    def pipeline(state: State, *, ahead: bool = False) -> Pipeline:
        found.append(state.sample_index)
        return make(state, ahead=ahead)

    monkeypatch.setattr(served.coordinator.timeline, "pipeline", pipeline)
    return found


def test_a_past_index_is_reached_from_the_nearest_journalled_state(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(place.serve())
    for _ in range(36):
        trainer.take(1)
        trainer.settle()
    served = place.restart()
    begun = going_forward_from(served, monkeypatch)
    served.history.snapshot(100)
    # Groups have 16 samples: the boundary is 96, and every boundary is journalled while there is room.
    assert min(begun) >= 80


def test_the_journal_is_bounded_and_loses_no_index(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom_server.run.committer.JOURNAL_BYTES", 4000)
    served = place.serve()
    trainer = Trainer(served)
    for _ in range(42):
        trainer.take(1)
        trainer.settle()
    coordinator = served.coordinator
    entries, size = coordinator.ledger.journal_size(coordinator.uid, "train")
    assert 1 < entries < 8
    assert size < 6000
    again = place.restart()
    assert again.history.snapshot(100)[0] == trainer.state(100).decode()


def test_a_snapshot_beyond_the_horizon_is_refused_with_the_limits(place: Place) -> None:
    served = place.serve()
    assert json.loads(served.history.snapshot(None)[0])["sample_index"] == 0
    with pytest.raises(BeyondHorizon, match="sample 1 is beyond the horizon 0: no trainer has joined"):
        served.history.snapshot(1)
    trainer = Trainer(served)
    trainer.take(2)
    trainer.settle()
    # Two steps of four are committed, and six more may be produced.
    served.history.snapshot(32)
    with pytest.raises(BeyondHorizon, match="sample 33 is beyond the horizon 32: 8 is committed"):
        served.history.snapshot(33)
    with pytest.raises(BeyondHorizon):
        served.history.snapshot(-1)


def test_a_rewound_run_has_one_answer_for_each_index(place: Place) -> None:
    served = place.serve()
    first = Trainer(served)
    first.take(9)
    state, early = first.state(16), first.state(8).decode()
    first.settle()
    second = Trainer(served, world_size=1, batch_size=3, state=state)
    second.take(3)
    second.settle()
    # Before the rewind the first generation's, from it on the second's.
    for restarted in (False, True):
        if restarted:
            served = place.restart()
        assert served.history.snapshot(8)[0] == early
        assert served.history.snapshot(22)[0] == second.state(22).decode()
        assert json.loads(served.history.snapshot(16)[0])["generation"] == 2
        assert json.loads(served.history.snapshot(15)[0])["generation"] == 1
        assert json.loads(served.history.snapshot(36)[0])["generation"] == 2


# --- commits, counters, fencing --------------------------------------------------------------------


def counters_of(place: Place) -> dict[str, tuple[int, int]]:
    committed = place.stored().committed
    assert committed is not None
    return {spec: (found.samples, found.tokens) for spec, found in committed.counters.items()}


def recount(served: ServedRun, samples: dict[int, Sample]) -> dict[str, tuple[int, int]]:
    given = Counter(sample.source for sample in samples.values())
    return {spec: (given[i], given[i] * 8) for i, spec in enumerate(served.coordinator.order.record.specs)}


def test_committed_counters_are_a_recount_of_what_the_ranks_took(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    for _ in range(6):
        trainer.take(5)
        trainer.settle()
        assert counters_of(place) == recount(served, trainer.taken())
    # Behind a rewind they are those of the new lineage alone.
    state = trainer.state(8)
    kept = part(sequence(served), 0, 8)
    again = Trainer(served, state=state)
    assert counters_of(place) == recount(served, kept)
    again.take(3)
    again.settle()
    assert counters_of(place) == recount(served, kept | again.taken())


def test_counters_move_when_the_slowest_rank_acknowledges_and_never_when_sent(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.ranks[0].take(5)
    trainer.ranks[1].take(2)
    trainer.settle()
    committed = place.stored().committed
    assert committed is not None
    assert committed.sample_index == 8


def test_a_fenced_generation_gets_nothing_and_moves_nothing(place: Place) -> None:
    served = place.serve()
    old = Trainer(served)
    old.take(2)
    state = old.state()
    old.ranks[0].receive()
    new = Trainer(served, state=state)
    before = place.stored()
    assert before.committed is not None
    rank = old.ranks[0]
    coordinator = served.coordinator
    with pytest.raises(Fenced, match="generation 1 of run 'test' is over: generation 2"):
        coordinator.next_for(rank.session, 1.0, never)
    with pytest.raises(Fenced):
        coordinator.progress(rank.session, rank.received, 9)
    with pytest.raises(Fenced):
        rank.connect(served)
    with pytest.raises(Fenced):
        coordinator.ledger.commit(
            coordinator.uid, "train", coordinator.lease.epoch, 1, replace(before.committed, sample_index=99), False
        )
    assert place.stored() == before
    coordinator.detach(rank.session)
    new.take(1)


def test_a_rank_that_waits_hears_of_the_new_generation_at_once(place: Place) -> None:
    served = place.serve()
    old = Trainer(served)
    old.ranks[0].take(6)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            served.coordinator.next_for(old.ranks[0].session, PATIENCE_S, never)
        except Fenced as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.05)
    Trainer(served, resume="fresh")
    thread.join(2.0)
    assert errors


def test_a_rank_of_another_attempt_is_fenced_even_where_a_lost_ledger_gave_its_number_again(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    coordinator, opening = served.coordinator, trainer.ranks[0].joined.opening
    with pytest.raises(Fenced, match=r"attempt 'zombie'.*attempt 'attempt-"):
        coordinator.attach(coordinator.uid, opening.generation, 0, trainer.ranks[0].call.nonce, 0, 0, attempt="zombie")
    with pytest.raises(LedgerRolledBack, match=r"generation 2 .*ledger is at generation 1"):
        coordinator.attach(coordinator.uid, opening.generation + 1, 0, trainer.ranks[0].call.nonce, 0, 0)
    trainer.take(2)
    trainer.settle()


def test_one_rank_with_another_digest_stops_all_of_them(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(2)
    rank = trainer.ranks[1]
    with pytest.raises(OrderMismatch, match="rank 1 has digest ffff"):
        served.coordinator.attach(rank.joined.uid, 1, 1, rank.call.nonce, rank.consumed, 0, "f" * 32)
    with pytest.raises(OrderMismatch, match="the ranks no longer see one order"):
        trainer.take(9)


def test_a_server_whose_client_met_a_newer_one_sends_nothing_more(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(1)
    rank = trainer.ranks[0]
    place.serve()
    with pytest.raises(NotLeader, match="served at server epoch 2 already, and this is 1"):
        served.coordinator.attach(rank.joined.uid, 1, 0, rank.call.nonce, rank.consumed, 0, "", 2)
    with pytest.raises(NotLeader):
        trainer.take(9)


def test_a_client_that_met_an_epoch_which_the_ledger_forgot_hears_of_lost_data_and_disturbs_nobody(
    place: Place,
) -> None:
    # A Redis that came back empty while its server was killed, too, counts its servers from 1 again.
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(1)
    rank = trainer.ranks[0]
    with pytest.raises(LedgerRolledBack, match=r"server epoch 2, but the ledger .* none beyond 1: it lost data"):
        served.coordinator.attach("of before", 1, 0, "zombie", 0, 0, "", 2)
    trainer.take(9)
    trainer.settle()
    committed = place.stored().committed
    assert committed is not None
    assert committed.sample_index == rank.consumed


def test_a_client_that_met_a_newer_server_gets_nothing_while_the_ledger_cannot_say_whether_there_is_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> StoredRun:
        raise LedgerUnavailable("away on purpose")

    served = place.serve()
    trainer = Trainer(served)
    trainer.take(1)
    rank = trainer.ranks[0]
    monkeypatch.setattr(served.coordinator.ledger, "read_run", unavailable)
    with pytest.raises(LedgerUnavailable):
        served.coordinator.attach(rank.joined.uid, 1, 0, rank.call.nonce, rank.consumed, 0, "", 2)
    with pytest.raises(NotLeader, match="served at server epoch 2 already, and this is 1"):
        served.coordinator.require_lead()


def test_of_two_servers_the_older_fails_closed_at_its_next_commit(place: Place) -> None:
    older = place.serve()
    trainer = Trainer(older)
    trainer.take(1)
    trainer.settle()
    newer = place.serve()
    # It would show at once in what the ranks are sent: no more than the window.
    with pytest.raises(NotLeader):
        for _ in range(20):
            trainer.take(1)
            trainer.settle()
    with pytest.raises(NotLeader):
        Trainer(older, resume="latest")
    stored = place.stored()
    assert stored.committed is not None
    assert stored.committed.sample_index == 4
    for rank in trainer.ranks:
        rank.connect(newer)
    for rank in trainer.ranks:  # one had taken a step when the older server ended
        rank.take((max(rank.consumed for rank in trainer.ranks) - rank.consumed) // 4)
    trainer.take(2)
    trainer.settle()
    assert counters_of(place) == recount(newer, trainer.taken())


def other(commit: Commit) -> Commit:
    return replace(commit, digest="f" * 32)


def test_a_commit_that_contradicts_the_ledger_stops_everything(place: Place) -> None:
    served = place.serve()
    coordinator = served.coordinator
    trainer = Trainer(served)
    text = json.loads(served.history.snapshot(4)[0])
    state = served.history.forward(served.history.parse(seal(text)))
    # Somebody else's order, at the index where this one commits next.
    coordinator.ledger.commit(
        coordinator.uid,
        "train",
        coordinator.lease.epoch,
        1,
        other(commit_of(coordinator.timeline, state, encode_state(coordinator.order, state))),
        False,
    )
    with pytest.raises(OrderMismatch):
        for _ in range(20):
            trainer.take(1)
            trainer.settle()
    assert isinstance(coordinator.view().error, OrderMismatch)
    committed = place.stored().committed
    assert committed is not None
    assert (committed.sample_index, committed.digest) == (4, "f" * 32)


def test_a_restarted_server_that_produces_another_order_delivers_nothing(place: Place) -> None:
    served = place.serve()
    coordinator = served.coordinator
    trainer = Trainer(served)
    rank = trainer.ranks[0]
    text = json.loads(served.history.snapshot(12)[0])
    point = served.history.parse(seal(text))
    state = served.history.forward(point)
    commit = commit_of(
        coordinator.timeline, state, encode_state(coordinator.order, point.base or coordinator.order.initial())
    )
    coordinator.ledger.commit(coordinator.uid, "train", coordinator.lease.epoch, 1, other(commit), False)
    again = place.restart()
    rank.received = rank.consumed = 12
    rank.connect(again)
    with pytest.raises(OrderMismatch, match="sample 12 was committed with digest ffff"):
        again.coordinator.next_for(rank.session, PATIENCE_S, never)


def test_a_ledger_that_lost_commits_is_refused(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(1)
    trainer.settle()
    lost = place.ledger_path.with_name("backup.db")
    place.stop()
    lost.write_bytes(place.ledger_path.read_bytes())
    served = place.serve()
    for rank in trainer.ranks:
        rank.connect(served)
    trainer.take(4)
    trainer.settle()
    trainer.ranks[0].committed_seen = 20
    place.stop()
    served = place.serve(lost)
    with pytest.raises(LedgerRolledBack, match="rank 0 saw a commit at sample 20, but the ledger is at 4"):
        trainer.ranks[0].connect(served)


@pytest.mark.parametrize(("generation", "index", "told"), [(1, 4, True), (1, 8, False), (2, 4, False), (0, 0, True)])
def test_a_loss_is_told_until_the_ledger_has_caught_up_perhaps_by_another_server(
    place: Place, generation: int, index: int, told: bool
) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(2)
    trainer.settle()
    stored = place.stored()
    assert stored.opening is not None and stored.committed is not None
    coordinator = served.coordinator
    coordinator.on_lease_lost(LedgerRolledBack("it lost data on purpose"))
    found = replace(
        stored,
        opening=replace(stored.opening, generation=generation) if generation else None,
        committed=replace(stored.committed, sample_index=index) if generation else None,
    )
    coordinator.lead(
        coordinator.lease.epoch, found, coordinator.timeline, coordinator.clock(), coordinator.clock() + 15
    )
    assert isinstance(coordinator.view().error, LedgerRolledBack) == told


def test_ranks_that_hear_of_a_busy_run_ask_for_longer_than_rank_0(place: Place) -> None:
    # It may be cut off from the server for a while; they gave up before it was heard again.
    place.timeouts = Timeouts(liveness_s=50.0)
    join_handler = place.serve().join_handler
    for rank in range(2):
        join_handler.join(call_of(rank))
    found = []
    for rank in range(2):
        with pytest.raises(RunBusy) as refused:
            join_handler.join(call_of(rank, attempt="b", resume="latest"))
        found.append(refused.value.retry_for_s)
    assert found[1] >= found[0] + 30


# --- restarts and ends -----------------------------------------------------------------------------


def test_ranks_go_on_over_restarts_with_what_they_hold(place: Place) -> None:
    served = place.serve()
    samples = sequence(served)
    trainer = Trainer(served)
    for round_ in range(6):
        trainer.take(3 + round_)
        # One rank holds more than it consumed, the other less.
        if not trainer.ranks[0].buffer:
            trainer.ranks[0].receive()
        if round_ % 2:
            trainer.settle()
        served = place.restart()
        for rank in trainer.ranks:
            rank.connect(served)
    while trainer.take(1):
        pass
    assert trainer.taken() == part(samples, 0, 172)
    trainer.settle()
    assert counters_of(place) == recount(served, trainer.taken())


def test_a_server_that_is_restarted_at_every_step_of_a_ramp_goes_on_with_the_size_that_comes_next(
    made: Callable[..., Place],
) -> None:
    place = made(window_steps=8)
    served = place.serve()
    samples = sequence(served)
    trainer = Trainer(served, batch_size=RAMP, accumulate=3)
    ends = []
    while trainer.take(1):
        ends.append(trainer.index)
        if len(ends) % 2:
            trainer.settle()
        assert served.history.snapshot(trainer.index)[0].encode() == trainer.state()
        served = place.restart()
        for rank in trainer.ranks:
            rank.connect(served)
    # Nine steps of 2 × 2, then nine of 2 × 5, of which the last begins before sample 100, then those of 2 × 1.
    assert ends == [*range(4, 37, 4), *range(46, 127, 10), *range(128, 175, 2)]
    assert trainer.taken() == part(samples, 0, 174)
    opening = place.stored().opening
    assert opening is not None
    assert (opening.batch_size, steps_of(opening).accumulate) == (2, 3)


@pytest.mark.parametrize(("last_step", "end", "dropped"), [("drop", 168, 7), ("pad", 175, 0)])
def test_all_ranks_end_at_the_same_step_with_the_reason_also_after_a_restart(
    made: Callable[..., Place], last_step: str, end: int, dropped: int
) -> None:
    place = made(last_step=last_step, window_steps=4)
    served = place.serve()
    trainer = Trainer(served, world_size=4, batch_size=2)
    while trainer.take(1):
        pass
    expected = EndOfData(end, "every source is exhausted", dropped)
    assert [rank.end for rank in trainer.ranks] == [expected] * 4
    assert trainer.index == end
    state = trainer.state()
    for settled in (False, True):
        if settled:
            trainer.settle()
        served = place.restart()
        for rank in trainer.ranks:
            rank.connect(served)
            assert not rank.receive()
            assert rank.end == expected
    trainer.settle()
    committed = place.stored().committed
    assert committed is not None
    assert committed.sample_index == end
    assert served.history.snapshot(end)[0].encode() == state
    over = Trainer(served, world_size=1, batch_size=1, state=state)
    rest = over.take(100)
    assert list(rest) == list(range(end, 175))


def test_a_smaller_window_after_a_restart_lets_the_run_go_on(made: Callable[..., Place]) -> None:
    place = made(window_steps=12)
    place.wrap = Away
    served = place.serve()
    ledger = served.coordinator.ledger
    assert isinstance(ledger, Away)
    trainer = Trainer(served)
    trainer.take(1)
    trainer.settle()
    ledger.away = True
    trainer.take(11)
    place.stop()
    document = yaml.safe_load(place.path.read_text())
    place.path.write_text(yaml.safe_dump(document | {"window_steps": 2}))
    served = place.serve()
    for rank in trainer.ranks:
        rank.connect(served)
    trainer.take(5)
    trainer.settle()
    assert counters_of(place) == recount(served, trainer.taken())


# --- a ledger that is away ---------------------------------------------------------------------------


class Away(SqliteLedger):
    """A ledger that can be away for commits, and that can lose the answer to an opening."""

    def __new__(cls, *_: object) -> Away:
        return super().__new__(cls)

    def __init__(self, ledger: SqliteLedger) -> None:
        super().__init__(Path(ledger.description.removeprefix("sqlite:///")))
        ledger.close()
        self.away = False
        self.lose_answer = self.lose_request = False
        self.keep_opening = False
        self.kept: tuple[Any, ...] = ()

    def commit(self, *args: Any) -> int:
        if self.away:
            raise LedgerUnavailable("away on purpose")
        return super().commit(*args)

    def open(self, *args: Any) -> None:
        if self.lose_request:
            self.lose_request = False
            raise LedgerUnavailable("the request was lost on purpose")
        if self.keep_opening:
            self.keep_opening, self.kept = False, args
            raise LedgerUnavailable("it is on its way")
        super().open(*args)
        if self.lose_answer:
            self.lose_answer = False
            raise LedgerUnavailable("the answer was lost on purpose")


def away(place: Place) -> tuple[ServedRun, Away]:
    place.wrap = Away
    served = place.serve()
    assert isinstance(served.coordinator.ledger, Away)
    return served, served.coordinator.ledger


def test_while_the_ledger_is_away_production_stops_at_the_horizon_and_nothing_is_lost(place: Place) -> None:
    served, ledger = away(place)
    trainer = Trainer(served)
    ledger.away = True
    trainer.take(6)
    found = served.coordinator.next_for(trainer.ranks[0].session, 0.2, never)
    assert found == Waiting("the ledger: away on purpose")
    assert place.runs.not_ready() == "run test: the ledger is away: away on purpose"
    ledger.away = False
    trainer.take(6)
    trainer.settle()
    assert place.runs.not_ready() is None
    assert counters_of(place) == recount(served, trainer.taken())


def patiently(call: Callable[[], T]) -> T:
    """What a client does while the server does not lead: it asks again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except NotLeader:
            assert time.monotonic() < deadline, "the server does not lead any more"
            time.sleep(0.01)


def test_the_other_ranks_wait_on_while_rank_0_cannot_reach_the_ledger(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, ledger = away(place)

    def unreachable(*_: object) -> NoReturn:
        raise LedgerUnavailable("away on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "read_run", unreachable)
        with pytest.raises(LedgerUnavailable):
            served.join_handler.join(call_of(0))
    assert served.join_handler.try_join(call_of(1)) is None
    assert served.join_handler.join(call_of(0)).opening == served.join_handler.join(call_of(1)).opening


def test_a_rank_whose_opening_the_ledger_has_lost_is_told_so(place: Place) -> None:
    served = place.serve()
    served.join_handler.join(call_of(0))
    with contextlib.closing(sqlite3.connect(place.ledger_path)) as file, file:
        file.execute("UPDATE runs SET generation = 0")
        file.execute("DELETE FROM openings")
    with pytest.raises(LedgerRolledBack, match=r"'a' opened a generation of run 'test', but sqlite://.* has none"):
        served.join_handler.join(call_of(1))


def test_a_server_whose_epoch_the_ledger_gave_out_twice_leads_no_longer(place: Place) -> None:
    served = place.serve()
    assert served.coordinator.leads()
    with contextlib.closing(sqlite3.connect(place.ledger_path)) as file, file:
        file.execute("UPDATE leases SET holder = 'another'")
    served.leadership.step()
    assert not served.coordinator.leads()
    assert "another has the lease of run 'test', at this server's own epoch" in served.coordinator.lease.stands_by_for


def test_an_opening_that_arrives_when_it_was_given_up_opens_nothing(place: Place) -> None:
    served, ledger = away(place)
    trainer = Trainer(served)
    trainer.take(2)
    trainer.settle()
    ledger.keep_opening = True
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(call_of(0, attempt="late", resume="latest", takeover=True))
    deadline = time.monotonic() + PATIENCE_S
    while not served.coordinator.leads():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(NotLeader):
        SqliteLedger.open(ledger, *ledger.kept)
    for rank in trainer.ranks:
        rank.connect(served)
    trainer.take(2)


def test_an_opening_whose_answer_was_lost_is_found_again_and_nothing_is_sent_to_the_launch_before(
    place: Place,
) -> None:
    served, ledger = away(place)
    trainer = Trainer(served)
    trainer.take(2)
    state = trainer.state()
    trainer.settle()
    ledger.lose_answer = True
    calls = [call_of(rank, attempt="lost", state=state) for rank in range(2)]
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(calls[0])
    # Its generation is over in the ledger, and this server cannot know.
    with pytest.raises((NotLeader, Fenced)):
        trainer.take(9)
    ranks = [patiently(lambda call=call: Rank(served, call)) for call in calls]  # type: ignore[misc]
    assert {rank.joined.opening.generation for rank in ranks} == {2}
    assert [rank.take(3) for rank in ranks] == [3, 3]
    with pytest.raises(Fenced):
        trainer.ranks[0].connect(served)


def test_an_opening_that_never_reached_the_ledger_leaves_the_launch_before_as_it_was(place: Place) -> None:
    served, ledger = away(place)
    trainer = Trainer(served)
    trainer.take(2)
    state = trainer.state()
    trainer.settle()
    ledger.lose_request = True
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(call_of(0, attempt="lost", state=state))
    for rank in trainer.ranks:
        patiently(lambda rank=rank: rank.connect(served))  # type: ignore[misc]
    trainer.take(5)
    trainer.settle()
    assert served.coordinator.view().generation.number == 1
    assert counters_of(place) == recount(served, trainer.taken())


def test_an_opening_whose_answer_was_lost_inherits_nothing_of_what_stopped_the_one_before(place: Place) -> None:
    served, ledger = away(place)
    trainer = Trainer(served)
    trainer.take(2)
    served.coordinator.fail(trainer.ranks[0].session.active, RankStalled("of the generation before"))
    ledger.lose_answer = True
    call = call_of(0, 1, attempt="lost", resume="latest", process="notebook")
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(call)
    rank = patiently(lambda: Rank(served, call))
    assert rank.take(3) == 3
    assert rank.session.active.process == "notebook"


def test_an_adoption_whose_answer_was_lost_is_found_again(place: Place, tmp_path: Path) -> None:
    trainer = Trainer(place.serve())
    trainer.take(2)
    state = trainer.state()
    place.stop()
    place.ledger_path = tmp_path / "elsewhere.db"
    served, ledger = away(place)
    ledger.lose_answer = True
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(call_of(0, attempt="moved", state=state))
    rank = patiently(lambda: Rank(served, call_of(0, world_size=2, attempt="moved", state=state)))
    Rank(served, call_of(1, world_size=2, attempt="moved", state=state))
    assert rank.take(3) == 3
    assert served.coordinator.uid == json.loads(state)["run_uid"]


def test_a_server_that_stops_commits_what_was_acknowledged(place: Place) -> None:
    trainer = Trainer(place.serve())
    trainer.take(5)
    place.stop()
    place.serve()
    committed = place.stored().committed
    assert committed is not None
    assert committed.sample_index == 20


def test_a_server_that_stops_waits_once_for_a_ledger_that_hangs_however_many_runs_it_has(
    folder: Path, tmp_path: Path
) -> None:
    hangs = threading.Event()

    class Hanging(SqliteLedger):
        def release(self, *_: object) -> None:
            hangs.wait(3.0)
            raise LedgerUnavailable("no answer")

    ledger = Hanging(tmp_path / "ledger.db")
    runs = Runs(ledger)
    for number in range(6):
        path = folder / f"{tmp_path.name}-{number}.yaml"
        path.write_text(yaml.safe_dump(mixture(run=f"run-{number}")))
        runs.add(path, None)
    began = time.monotonic()
    runs.stop()
    assert time.monotonic() - began < 8
    hangs.set()
    for served in (runs.get(name) for name in runs.names()):
        served.leadership.join(PATIENCE_S)
    ledger.close()


def test_a_server_that_stops_makes_no_more_blocks_ahead(place: Place) -> None:
    def makers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith(f"{RUN}-ahead")}

    before = makers()
    Trainer(place.serve()).take(2)
    ours = makers() - before
    assert ours
    place.stop()
    # The interpreter waits for them when it ends, and they for all that they have to do.
    for thread in ours:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_what_still_produces_when_the_interpreter_ends_is_no_fault(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producing, ends = threading.Event(), threading.Event()

    def fill(*_: Any) -> None:
        producing.set()
        ends.wait(PATIENCE_S)
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(Pipeline, "fill", fill)
    served = place.serve()
    Rank(served, call_of(world_size=1))
    assert producing.wait(PATIENCE_S)
    served.coordinator.stop(0.01)
    ends.set()
    for worker in served.coordinator._workers:
        worker.join(PATIENCE_S)
    assert served.coordinator.view().error is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_streams_of_a_stopping_server_end_with_a_word(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served)
    served.coordinator.stop()
    with pytest.raises(ServerStopping):
        trainer.take(1)


# --- what people see -------------------------------------------------------------------------------


def test_each_source_says_where_it_resumes(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(9)
    state = served.history.forward(served.history.parse(trainer.state()))
    with caplog.at_level(logging.INFO):
        Trainer(served, state=trainer.state())
    cursor = state.sources[0].cursor
    line = f"resume: spec={CODE} sample_row={state.sources[0].rows} shard=data/code-{cursor.shard}.parquet"
    assert f"{line} offset={cursor.row}" in caplog.messages
    assert sum(message.startswith("resume: spec=") for message in caplog.messages) == 4


def test_a_wait_names_the_rank_that_holds_the_others_back(place: Place) -> None:
    served = place.serve()
    assert served.coordinator.view().waiting_for == "a trainer"
    first = Rank(served, call_of(0))
    first.take(6)
    found = served.coordinator.next_for(first.session, 0.1, never)
    assert found == Waiting("rank 1 to connect")
    Rank(served, call_of(1)).take(2)
    first.take(2)
    assert served.coordinator.next_for(first.session, 0.1, never) == Waiting("rank 1 to go on from sample 8")


def test_a_bad_row_stops_the_run_behind_all_that_came_before_it(folder: Path, tmp_path: Path) -> None:
    here = write_corpus(tmp_path / "own")
    place = Place(here, tmp_path, flat([CODE, WIKI], window_steps=40))
    served = place.serve()
    trainer = Trainer(served, world_size=1, batch_size=1)
    (here / "data/code-1.parquet").unlink()
    with pytest.raises(SourceError, match=r"code-1\.parquet"):
        trainer.take(1000)
    assert trainer.taken()
    assert place.runs.not_ready() is None, "the attempt that goes on behind it must reach the server"
    place.stop()


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_good_step_before_a_bad_row_is_delivered_and_committed_then_the_error_names_the_line(
    tmp_path: Path, world_size: int
) -> None:
    rows = [f"document number {i} of some" for i in range(500)]
    lines = [json.dumps({"text": text}) for text in rows]
    lines[400] = '{"text": "cut off'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    document = {
        "run": RUN,
        "tokenizer": "bytes",
        "sequence_length": 16,
        "mixture": {"policy": "weighted", "children": [{"source": "jsonl:rows.jsonl:text"}]},
    }
    place = Place(tmp_path, tmp_path, document)
    served = place.serve()
    try:
        trainer = Trainer(served, world_size=world_size, batch_size=1)
        tokens = sum(len(text) + 1 for text in rows[:400])
        steps = tokens // 16 // world_size
        assert len(trainer.take(steps)) == steps * world_size
        trainer.settle()
        assert served.coordinator.committed_through == steps * world_size
        for rank in trainer.ranks:
            with pytest.raises(SourceError, match=r"rows\.jsonl.*line 401"):
                rank.take(1)
    finally:
        place.stop()


def test_a_new_attempt_that_takes_over_a_streaming_run_is_committed_like_the_first(place: Place) -> None:
    served = place.serve()
    for _ in range(5):
        # The committer is between two commits of the old generation when the new one comes.
        old = Trainer(served, resume="fresh")
        old.take(3)
        new = Trainer(served, resume="fresh")
        new.take(4)
        new.settle()
        assert served.coordinator.committed_through == 16
        assert served.coordinator.not_ready() is None


def test_a_dead_thread_is_a_reason_not_to_be_ready(place: Place) -> None:
    served = place.serve()
    assert place.runs.not_ready() is None
    ended = threading.Thread(name="ended", target=int)
    ended.start()
    ended.join()
    served.coordinator._workers = (*served.coordinator._workers, ended)
    assert "its thread ended has ended" in (place.runs.not_ready() or "")


# --- revisions ---------------------------------------------------------------------------------------


class Slow(SqliteLedger):
    """A ledger that has something done while a revision is on its way to it."""

    def __new__(cls, *_: object) -> Slow:
        return super().__new__(cls)

    def __init__(self, ledger: SqliteLedger) -> None:
        super().__init__(Path(ledger.description.removeprefix("sqlite:///")))
        ledger.close()
        self.meanwhile: Callable[[StoredRevision], None] = lambda revision: None

    def revise(self, uid: str, stream: str, epoch: int, revision: StoredRevision) -> None:
        self.meanwhile(revision)
        super().revise(uid, stream, epoch, revision)


def slow(place: Place) -> tuple[ServedRun, Slow]:
    place.wrap = Slow
    served = place.serve()
    assert isinstance(served.coordinator.ledger, Slow)
    return served, served.coordinator.ledger


def heavier(**fields: Any) -> MixtureChange:
    change = {"reason": "a test", "set": [{"child": "docs", "weight": 20}], **fields}
    return MixtureChange.model_validate(change)


def samples_of(served: ServedRun, count: int) -> list[tuple[int, bytes]]:
    """What the run's order is, from a pipeline of its own."""
    pipeline = served.coordinator.timeline.pipeline(served.coordinator.timeline.initial())
    group = pipeline.begin_group(BatchPlan(start_index=0, world_size=1, batch_size=1, group_steps=count))
    pipeline.fill(group, count)
    sources = group.source_ids[0, :, 0].tolist()
    return [(source, bytes(ids)) for source, ids in zip(sources, group.ids(0, 0, count), strict=True)]


@pytest.fixture
def short_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """State boundaries every two steps, so that revisions hold soon."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 2)


@pytest.mark.parametrize("batch_size", [2, ((0, 2), (160, 3), (256, 1))])
@pytest.mark.parametrize("behind", [0, 3])
def test_ranks_go_on_to_a_revision_that_is_being_written_and_no_further(
    made: Callable[..., Place], short_groups: None, behind: int, batch_size: Sizes
) -> None:
    served, ledger = slow(made(window_steps=4))
    trainer = Trainer(served, batch_size=batch_size)
    step = 2 * (batch_size if isinstance(batch_size, int) else 3)
    trainer.take(3)
    trainer.settle()

    def meanwhile(revision: StoredRevision) -> None:
        # Commits go on, and with them the window: nothing but the revision stops production now.
        while trainer.index + 2 * step <= revision.sample_index:
            trainer.take(1)
            trainer.settle()

    ledger.meanwhile = meanwhile
    index = served.coordinator.view().first_revisable + behind
    revision = served.revising.revise(heavier(sample_index=index))
    assert revision.sample_index == index
    trainer.take(20)
    expected = samples_of(served, trainer.index)
    assert [(sample[0], bytes(sample[1])) for _, sample in sorted(trainer.taken().items())] == expected
    plain = served.coordinator.timeline.with_revisions(())
    assert served.coordinator.timeline.at(index).config != plain.at(index).config
    # A restore anywhere, and another server, find the same.
    trainer.settle()
    again = Trainer(served, 3, 1, state=trainer.state(trainer.index), takeover=True)
    again.take(2)
    taken = [(sample[0], bytes(sample[1])) for _, sample in sorted(again.taken().items())]
    assert taken == samples_of(served, again.index)[trainer.index :]


def test_a_run_whose_source_was_left_fewer_epochs_than_it_had_begun_is_resumed(made: Callable[..., Place]) -> None:
    children = [{"source": CODE, "alias": "code", "epochs": 3, "weight": 9}, {"source": WIKI}]
    served = made(mixture={"policy": "least_consumed", "children": children}).serve()
    change = {"reason": "a test", "sample_index": 100, "set": [{"child": "code", "epochs": 1}]}
    served.revising.revise(MixtureChange.model_validate(change))
    trainer = Trainer(served)
    trainer.take(27)
    state = json.loads(trainer.state())["resume_state"]["datasets"][0]
    assert state["epoch"] == 1 and trainer.index == 108
    again = Trainer(served, state=trainer.state(), takeover=True)
    again.take(2)
    assert again.index == 116


def test_a_revision_of_an_epoch_that_is_over_is_not_written(made: Callable[..., Place], short_groups: None) -> None:
    served, ledger = slow(made(window_steps=4))
    coordinator = served.coordinator
    # Another server took the lead and gave it back while the revision was on its way.
    ledger.meanwhile = lambda revision: served.leadership._acquire()
    with pytest.raises(NotLeader):
        served.revising.revise(heavier(sample_index=0))
    assert (
        not coordinator.timeline.revisions
        and not ledger.revisions(coordinator.uid, coordinator.stream)
        and coordinator._revising_at is None
    )

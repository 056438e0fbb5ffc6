"""Peeks at a run without a socket: how far they go, in whose turn, and what they hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, flat, mixture
from support.served import PATIENCE_S, RUN, Trainer, never, sequence, serving
from support.waiting import wait_for
from tokenloom_proto.seal import seal, unseal
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core import caller
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    JoinRefused,
    NotFound,
    OrderMismatch,
    ServerStopping,
    SnapshotInvalid,
    SourceError,
)
from tokenloom_server.replay.peek import Peek, PeekCall
from tokenloom_server.run.generation import Delivery, EndOfData, Waiting
from tokenloom_server.run.past import MAX_PEEKS


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[ServedRun]:
    with serving(folder, tmp_path, mixture()) as run:
        yield run


@pytest.fixture
def ids(served: ServedRun) -> list[bytes]:
    """Every sample of the order."""
    return [sample.ids for sample in sequence(served)]


def joined(served: ServedRun, resume: str = "", **fields: Any) -> State:
    call = PeekCall(
        **{"rank": 0, "world_size": 1, "batch_size": 1, "resume": resume, "state": b""} | fields
    )
    return served.peeks.join(call)[1]


def shown(peek: Peek, count: int) -> list[bytes]:
    """The next ``count`` samples of steps of one, or fewer where the data end."""
    found: list[bytes] = []
    while len(found) < count:
        made = peek.next(PATIENCE_S, never)
        assert not isinstance(made, Waiting), "a peek has its credits and makes nothing"
        if isinstance(made, EndOfData):
            break
        found += [sample.tobytes() for sample in made.group.ids(0, made.first, made.last)]
    return found


@contextmanager
def looking(
    served: ServedRun, at: int, steps: int, size: int = 1, digest: str = ""
) -> Iterator[Peek]:
    """A peek at samples from one on, with the credit of so many micro-steps."""
    with served.peeks.open(served.coordinator.uid, at, size, digest) as peek:
        peek.progress(at, steps)
        yield peek


def test_a_peek_after_a_skip_shows_what_the_run_gives_there(
    served: ServedRun, ids: list[bytes]
) -> None:
    Trainer(served, 1, 1).train_to(40)
    assert sum(source.skipped_samples for source in joined(served, "60").sources) == 0
    served.restores.restore(sample_index=20, skip_samples=10)
    Trainer(served, 1, 1).take(1)
    for at, passed in ((19, 0), (20, 10), (60, 10)):
        state = joined(served, str(at))
        assert (state.sample_index, sum(source.skipped_samples for source in state.sources)) == (
            at,
            passed,
        )
        with looking(served, at, 3) as peek:
            assert shown(peek, 3) == (ids[:20] + ids[30:])[at : at + 3]


def test_what_the_journal_reaches_is_never_too_far_but_the_future_is(
    served: ServedRun, ids: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.run.past.AHEAD_SAMPLES", 5)
    assert joined(served, "5").sample_index == 5
    with pytest.raises(
        BeyondHorizon, match=r"sample 11 is 6 samples beyond sample 5, .* goes 5 further at most"
    ):
        joined(served, "11")
    Trainer(served, 1, 1).train_to(40)
    for at in (39, 20, 40, 45):
        with looking(served, at, 2) as peek:
            assert shown(peek, 2) == ids[at : at + 2]
    with pytest.raises(BeyondHorizon, match=r"beyond sample 4\d, .* \(committed: 40\)"):
        joined(served, "70")


def test_a_peek_gives_what_the_credits_allow_and_no_more(
    served: ServedRun, ids: list[bytes]
) -> None:
    with looking(served, 3, 2, size=2) as peek:
        made = peek.next(PATIENCE_S, never)
        assert isinstance(made, Delivery)
        assert (made.group.begin, made.group.end, made.with_base) == (3, 7, True)
        assert peek.next(0.05, never) == Waiting("")
        peek.progress(5, 2)
        assert shown(peek, 1) == ids[7:9]
        assert peek.next(0.05, never) == Waiting("")
        with pytest.raises(
            JoinRefused, match="reports sample 11 as consumed, but it was sent nothing beyond 9"
        ):
            peek.progress(11, 2)


def test_a_peek_that_rests_lets_its_pipeline_go_and_goes_on_all_the_same(
    served: ServedRun, ids: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.replay.peek.REST_S", 0.0)
    with served.peeks.open(served.coordinator.uid, 0, 1) as peek:
        for at in range(0, len(ids), 10):
            peek.progress(at, 10)
            assert shown(peek, 10) == ids[at : at + 10]
            if at + 10 <= len(ids):
                assert peek.next(0.01, never) == Waiting("")
                assert peek._replay.rests
        assert isinstance(peek._end, EndOfData)


def test_a_peek_nearby_does_not_wait_for_one_that_goes_a_long_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.order.replay.TURN_TOKENS", 8)  # one sample
    endless = {"policy": "weighted", "children": [{"source": CODE, "epochs": float("inf")}]}
    far = 60_000
    with (
        serving(folder, tmp_path, mixture(mixture=endless)) as served,
        served.peeks.open(served.coordinator.uid, far, 1) as long,
        served.peeks.open(served.coordinator.uid, 1, 1) as short,
    ):

        def go_far() -> None:
            with suppress(ServerStopping):
                while isinstance(long.next(PATIENCE_S, never), Waiting):
                    pass

        long.progress(far, 1)
        thread = threading.Thread(target=go_far)
        thread.start()
        wait_for(lambda: long._replay.sample_index > 9, "the beginning of the long way")
        short.progress(1, 3)
        assert len(shown(short, 3)) == 3
        assert long._replay.sample_index < far
        served.peeks.stop()
        thread.join(PATIENCE_S)


def test_who_waits_hears_how_far_it_is(served: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom_server.order.replay.TURN_TOKENS", 8)
    with looking(served, 60, 1) as peek:
        heard = set()
        while isinstance(made := peek.next(0.0, never), Waiting):
            heard.add(made.waiting_for)
        assert any(text.startswith("sample 60: this peek is at ") for text in heard)


def test_a_client_that_came_with_other_data_is_told(served: ServedRun) -> None:
    digest = digest_hex(joined(served, "9").digest)
    for came in (digest, ""):
        with looking(served, 9, 1, digest=came) as peek:
            assert len(shown(peek, 1)) == 1
    with (
        looking(served, 9, 1, digest="1" * 32) as peek,
        pytest.raises(
            OrderMismatch,
            match=f"sample 9 has digest {digest} here, but this peek came there with 1111",
        ),
    ):
        peek.next(PATIENCE_S, never)
    with (
        pytest.raises(NotFound, match="this peek began with another-uid"),
        served.peeks.open("another-uid", 9, 1),
    ):
        pass


def test_the_states_that_are_remembered_are_bounded(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.run.past.KNOWN_STATES", 3)
    for at in (1, 2, 3, 1, 4):
        joined(served, str(at))
    assert sorted(served.past._known) == [(0, 1), (0, 3), (0, 4)]


def test_all_who_look_hear_that_the_server_stops(served: ServedRun) -> None:
    errors: list[Exception] = []

    def wait(peek: Peek) -> None:
        try:
            peek.next(PATIENCE_S, never)
        except ServerStopping as error:
            errors.append(error)

    with looking(served, 0, 1) as peek:
        shown(peek, 1)
        thread = threading.Thread(target=wait, args=(peek,))
        thread.start()
        served.peeks.stop()
        thread.join(PATIENCE_S)
    assert len(errors) == 1
    for late in (lambda: joined(served), lambda: joined(served, "30")):
        with pytest.raises(ServerStopping):
            late()


def test_nobody_goes_forward_for_a_client_that_is_gone(served: ServedRun) -> None:
    call = PeekCall(rank=0, world_size=1, batch_size=1, resume="30", state=b"")
    token = caller.waits.set(lambda: False)
    with pytest.raises(ServerStopping, match="nobody waits"):
        served.peeks.join(call)
    caller.waits.reset(token)
    assert joined(served, "30").sample_index == 30, "its place is free"


def test_all_samples_before_a_bad_row_are_shown(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {number:04}"}) for number in range(40)]
    lines[30] = '{"text": 30'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    document = flat(["jsonl:rows.jsonl:text"], sequence_length=9)
    seen: list[bytes] = []
    with (
        serving(tmp_path, tmp_path, document) as served,
        looking(served, 0, 100) as peek,
        pytest.raises(SourceError, match=r"rows\.jsonl.*31"),
    ):
        while True:
            seen += shown(peek, 1)
    texts = [bytes(memoryview(ids).cast("H").tolist()[:8]).decode() for ids in seen]
    assert texts == [f"row {number:04}" for number in range(30)]


def test_what_cannot_be_looked_at_is_refused_by_name(served: ServedRun) -> None:
    trainer = Trainer(served, 1, 1).train_to(3)
    forged = seal(unseal(trainer.state()) | {"digest": "1" * 32}).encode()
    for fields, error, says in (
        ({"resume": "9" * 17}, NotFound, "run 'test' has no snapshot '99999999999999999' .newest"),
        (
            {"batch_size": 10**7},
            JoinRefused,
            "a peek's micro-step of 10000000 samples has 160000000 bytes; expected 1",
        ),
        ({"rank": 1, "world_size": 2}, JoinRefused, "rank 1 of 2; expected rank 0 of 1"),
        ({"state": forged}, SnapshotInvalid, "going forward .* gives digest"),
    ):
        with pytest.raises(error, match=says):
            joined(served, **fields)


def test_a_run_that_nobody_joined_is_looked_at_and_begins_as_before(
    served: ServedRun, ids: list[bytes]
) -> None:
    for _ in range(MAX_PEEKS + 1):  # the place of one that is at the end is free again
        with looking(served, len(ids) - 1, 2) as peek:
            assert shown(peek, 2) == ids[-1:]
    stored = served.coordinator.ledger.read_run(RUN, "train")
    assert stored is not None and stored.opening is None
    # A launch that brings no state is refused where there is progress: there is none.
    assert [sample.ids for sample in Trainer(served, 2, 3).take(4).values()] == ids[:24]


def test_a_padded_last_micro_step_is_padded_for_who_looks_too(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path, mixture(last_micro_step="pad")) as served:
        end = len(sequence(served))
        with looking(served, end - 1, 1, size=4) as peek:
            made = peek.next(PATIENCE_S, never)
            assert isinstance(made, Delivery)
            assert (made.group.source_ids[0, made.first] >= 0).tolist() == [True] + [False] * 3
            assert made.group.marks[made.first].sample_index == end

"""Threads that nothing ends unseen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenloom_proto import threads
from tokenloom_proto.errors import ConfigError
from tokenloom_proto.threads import Background, Loop, faults, pool


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE_S", 0.0)
    faults.cache_clear()


@pytest.mark.parametrize(
    ("error", "counted"), [(Panic("no"), 2), (KeyError("no"), 2), (ConfigError("no"), 0)]
)
def test_what_a_turn_raises_is_counted_said_once_and_followed_by_the_next(
    error: BaseException, counted: int, caplog: pytest.LogCaptureFixture
) -> None:
    turns: Iterator[object] = iter([True, error, error, True, False])
    faults_seen: list[str] = []

    def work() -> object:
        faults_seen.append(thread.fault)
        turn = next(turns)
        if isinstance(turn, BaseException):
            raise turn
        return turn

    thread = Loop("watcher", work, "wiki")
    assert faults() == {"watcher": 0}
    thread.start()
    thread.join()
    assert (faults(), next(turns, None)) == ({"watcher": counted}, None)
    said = f"{type(error).__name__}: {error}"
    assert faults_seen == ["", "", said, said, ""]
    assert caplog.messages == [f"thread wiki-watcher: {said}"]
    assert bool(caplog.records[0].exc_info) is bool(counted)


def test_work_that_is_done_once_and_fails_is_said_and_one_that_is_to_end_has_no_next_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        again.ending.set()
        raise ValueError("no")

    again = Loop("again", fail)
    for thread in (Background("once", fail), again):
        thread.start()
        thread.join()
    assert faults() == {"once": 1, "again": 1}
    assert caplog.messages == [f"thread {name}: ValueError: no" for name in ("once", "again")]


def test_what_begins_late_does_not_begin_where_nobody_wants_it_any_more() -> None:
    begun = threading.Event()
    late, unwanted = (Background("late", begun.set, after_s=s) for s in (0.01, 3600.0))
    unwanted.ending.set()
    unwanted.start()
    unwanted.join()
    assert not begun.is_set()
    late.start()
    late.join()
    assert begun.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux is asked")
def test_the_kernel_knows_threads_by_what_they_do() -> None:
    def name() -> str:
        return Path("/proc/thread-self/comm").read_text(encoding="utf-8").strip()

    names: list[str] = []
    thread = Background("producer", lambda: names.append(name()), "wiki-größer")
    thread.start()
    thread.join()
    with pool(1, "ahead", "wiki") as made:
        names.append(made.submit(name).result())
    assert names == ["producer wiki-g", "ahead wiki"]

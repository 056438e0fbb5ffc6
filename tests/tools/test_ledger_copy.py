"""Moving a run, killed before and after each of its writes: it is in one ledger, and running it again finishes it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.ledger_server import NAME, STREAM, UID, Server, lead
from support.ledger_stores import LedgerStore, RedisStore, SqliteStore
from support.redis_server import RedisServer
from tokenloom_server.errors import LedgerError, LedgerUnavailable, NotLeader, TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Acquire, Command, Import, Move
from tokenloom_server.ledger.records import RunContents
from tokenloom_tools.ledger import copy_run


class Died(BaseException):
    """As with kill -9, nothing that is to come is done."""


class Dying:
    """A ledger whose caller dies at one of its writes, before that is done or after."""

    def __init__(self, ledger: Ledger, is_last: Callable[[], bool], *, after: bool) -> None:
        self._ledger, self._is_last, self._after = ledger, is_last, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def execute(self, command: Command) -> int:
        is_last = self._is_last()
        if is_last and not self._after:
            raise Died
        answer = self._ledger.execute(command)
        if is_last:
            raise Died
        return answer


def _whole(ledger: Ledger) -> RunContents:
    contents = ledger.read_all(NAME, STREAM)
    assert contents is not None
    return contents


def _may_lead(ledger: Ledger) -> bool:
    """Whether a server could take the run up here, if it waited for the lease of the copy to lapse."""
    run = ledger.read_run(NAME, STREAM)
    return run is not None and not run.elsewhere


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("into", ["redis", "sqlite"])
def test_a_move_that_is_killed_at_any_write_is_finished_by_the_next(
    redis_server: RedisServer, tmp_path: Path, into: str, after: bool
) -> None:
    for last in range(4):
        stores: list[LedgerStore] = [SqliteStore(tmp_path), RedisStore(redis_server)]
        source, target = (store.open() for store in (stores if into == "redis" else stores[::-1]))
        server = lead(source)
        server.open(1, 0)
        server.claim(0, "n")
        server.commit(4, journal=True)
        before = _whole(source)
        number = count()

        def is_last(last: int = last, number: count[int] = number) -> bool:
            return next(number) == last

        dying: list[Any] = [Dying(ledger, is_last, after=after) for ledger in (source, target)]
        with pytest.raises(Died):
            copy_run(dying[0], dying[1], NAME, STREAM)
        # Never in both; in none only while the one says the run is there, and that one not yet that it is here.
        done = last + after
        assert (_may_lead(source), _may_lead(target)) == (done < 3, done == 4)
        if last < 2:  # a server took it up meanwhile, and ended
            held = source.read_run(NAME, STREAM)
            assert held is not None
            holder = held.lease.holder if held.lease is not None else ""
            Server(source, source.execute(Acquire(UID, STREAM, holder, 0.0))).commit(8)
            before = _whole(source)
        assert copy_run(source, target, NAME, STREAM) == (done < 4)
        assert not copy_run(source, target, NAME, STREAM)
        assert (_may_lead(source), _may_lead(target)) == (False, True)
        arrived = _whole(target)
        assert (arrived.run.committed, arrived.slots) == (before.run.committed, before.slots)
        assert (arrived.openings, arrived.journal) == (before.openings, before.journal)
        assert arrived.run.epoch > _whole(source).run.epoch - 1 >= before.run.epoch - 1
        goes_on = Server(target, target.execute(Acquire(UID, STREAM, "two", 0.0)))
        assert goes_on.commit(12) == 12
        with pytest.raises(NotLeader, match="is not served from this ledger"):
            server.commit(12)
        # Back again, over what says that it is elsewhere.
        assert copy_run(target, source, NAME, STREAM)
        assert _whole(source).run.committed == _whole(target).run.committed
        assert _may_lead(source)
        for store in stores:
            store.close()


def test_two_moves_at_once_leave_what_the_later_one_read(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    stores: list[LedgerStore] = [SqliteStore(tmp_path), RedisStore(redis_server)]
    source, target = (store.open() for store in stores)
    server = lead(source)
    server.open(1, 0)
    old = _whole(source)
    paused = source.execute(Acquire(UID, STREAM, "the first", 0.0))
    Server(source, source.execute(Acquire(UID, STREAM, "a server", 0.0))).commit(8)

    class Overtaken(Dying):
        def execute(self, command: Command) -> int:
            if isinstance(command, Move) and command.elsewhere == "":
                with pytest.raises(NotLeader):  # the first one goes on, with what it read before
                    target.execute(Import(UID, STREAM, old, elsewhere=source.description))
                with pytest.raises(NotLeader):
                    source.execute(Move(UID, STREAM, paused, target.description))
            return super().execute(command)

    overtaken: Any = Overtaken(target, lambda: False, after=False)
    assert copy_run(source, overtaken, NAME, STREAM)
    committed = _whole(target).run.committed
    assert committed is not None
    assert committed.sample_index == 8
    for store in stores:
        store.close()


def test_a_target_that_refuses_leaves_the_run_where_it_was(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    stores: list[LedgerStore] = [SqliteStore(tmp_path), RedisStore(redis_server)]
    source, target = (store.open() for store in stores)
    server = lead(source)
    server.open(1, 0)
    target.create_run(NAME, STREAM, "uid-9", "{}")
    with pytest.raises(LedgerError, match="is in this ledger already"):
        copy_run(source, target, NAME, STREAM)
    assert _may_lead(source)
    source.execute(Acquire(UID, STREAM, "at once", 0.0))
    source.execute(Move(UID, STREAM, _whole(source).run.epoch, target.description))
    with pytest.raises(LedgerError, match=r"which does not have it"):
        copy_run(source, target, NAME, STREAM)
    third = SqliteStore(tmp_path)
    with pytest.raises(NotLeader, match="is not served from this ledger"):
        copy_run(source, third.open(), NAME, STREAM)
    redis_server.kill()
    try:
        with pytest.raises((LedgerUnavailable, TokenloomError)):
            copy_run(source, target, NAME, STREAM)
    finally:
        redis_server.start()
    for store in (*stores, third):
        store.close()

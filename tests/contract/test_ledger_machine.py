"""Random histories of two servers on one run, with crashes of the store, against a model of the contract.

The model is a dozen lines per call and knows no storage. It must agree after every step, on SQLite and
on Redis. A machine that finds nothing proves nothing: ledgers with a check removed must be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.ledger_data import commit_at, opening_of, revision_of
from support.ledger_stores import LedgerStore, RedisStore, SqliteStore
from support.redis_server import RedisServer
from tokenloom_server.errors import (
    AttemptUsed,
    Fenced,
    LeaseHeld,
    LedgerError,
    LedgerRolledBack,
    NotLeader,
    OrderMismatch,
)
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import Opening, StoredRevision, StoredSnapshot
from tokenloom_server.ledger.redis import RedisLedger
from tokenloom_server.ledger.sqlite import SqliteLedger

NAME, STREAM, UID = "run", "train", "uid"

#: A lease that does not lapse while a history is under way.
LONG_S = 1000.0

#: What a call did: it returned, or it raised this.
Outcome = int | type[Exception] | None


@dataclass
class Model:
    """The contract, in memory."""

    epoch: int = 0
    #: The server that acquired last, and the one whose lease has not lapsed.
    holder: int | None = None
    held_by: int | None = None
    heard_at: float | None = None
    generation: int = 0
    committed: tuple[int, str] | None = None
    pin: str | None = None
    attempts: dict[str, int] = field(default_factory=dict)
    openings: list[Opening] = field(default_factory=list)
    opened_by: int = 0
    slots: dict[int, str] = field(default_factory=dict)
    journal: dict[int, dict[int, str]] = field(default_factory=dict)
    snapshots: dict[str, StoredSnapshot] = field(default_factory=dict)
    revisions: list[StoredRevision] = field(default_factory=list)

    def acquire(self, who: int, lasts: bool) -> Outcome:
        if self.held_by not in (None, who):
            return LeaseHeld
        self.epoch += 1
        self.holder, self.held_by = who, who if lasts else None
        return self.epoch

    def renew(
        self, who: int, epoch: int, holder: int, lasts: bool, heard_at: float | None, generation: int, known: int
    ) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        if self._is_behind(generation, known):
            return LedgerRolledBack
        if holder != self.holder:
            return NotLeader
        self.held_by, self.heard_at = who if lasts else None, heard_at
        return None

    def release(self, epoch: int) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        self.held_by = None
        return None

    def _is_behind(self, generation: int, known: int) -> bool:
        committed = self.committed[0] if self.committed else 0
        return generation > self.generation or (generation == self.generation and known > committed)

    def open(self, epoch: int, opening: Opening, order: str) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        if self.openings and opening == self.openings[-1] and epoch == self.opened_by:
            return None
        if opening.attempt in self.attempts:
            return AttemptUsed
        if opening.generation <= self.generation:
            return LedgerError
        self.generation, self.opened_by, self.pin, self.slots = opening.generation, epoch, None, {}
        self.attempts[opening.attempt] = opening.generation
        self.openings.append(opening)
        self.committed = (opening.start_index, order)
        self.journal[opening.generation] = {opening.start_index: opening.start_state}
        return None

    def fence(self, epoch: int, generation: int) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        return Fenced if generation != self.generation or not self.generation else None

    def claim(self, epoch: int, generation: int, rank: int, nonce: str) -> Outcome:
        refusal = self.fence(epoch, generation)
        return refusal or (AttemptUsed if self.slots.setdefault(rank, nonce) != nonce else None)

    def commit(self, epoch: int, generation: int, index: int, order: str, journal: bool, known: int) -> Outcome:
        refusal = self.fence(epoch, generation)
        if refusal is not None:
            return refusal
        if self._is_behind(generation, known):
            return LedgerRolledBack
        assert self.committed is not None
        if index == self.committed[0] and order != self.committed[1]:
            return OrderMismatch
        if index > self.committed[0]:
            self.committed = (index, order)
            if journal:
                self.journal[generation][index] = commit_at(index, order).state
        return self.committed[0]

    def thin(self, epoch: int) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        self.journal = {generation: dict(sorted(entries.items())[::2]) for generation, entries in self.journal.items()}
        return None

    def set_pin(self, epoch: int, pin: str | None) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        self.pin = pin
        return None

    def revise(self, epoch: int, revision: StoredRevision) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        if revision in self.revisions:
            return None
        if revision.number != len(self.revisions) + 1:
            return LedgerError
        if self.revisions and revision.sample_index < self.revisions[-1].sample_index:
            return LedgerError
        self.revisions.append(revision)
        return None

    def drop_revisions(self, epoch: int, number: int) -> Outcome:
        if epoch != self.epoch:
            return NotLeader
        self.revisions = self.revisions[: number - 1]
        return None

    def save(self, snapshot: StoredSnapshot) -> Outcome:
        found = self.snapshots.setdefault(snapshot.id, snapshot)
        return LedgerError if found.text != snapshot.text else None


# Mostly the server that leads, and mostly the present generation: otherwise nearly every call is refused.
LEADS = st.sampled_from([True] * 6 + [False])
LAG = st.sampled_from([0] * 6 + [1, 2])
STEP = st.sampled_from([-3, -1, 0, 0, 1, 2, 5])
ORDER = st.sampled_from(["0", "0", "f"])


class LedgerMachine(RuleBasedStateMachine):
    """Two servers, of which the one that acquired last leads."""

    make_store: Callable[[], LedgerStore]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.epochs = [0, 0]
        self.leader = 0
        self.last: tuple[Callable[[], Any], Callable[[], Outcome]] | None = None
        self.store = type(self).make_store()

    @initialize(opened=st.sampled_from([True, True, False]))
    def begin(self, opened: bool) -> None:
        self.ledgers = [self.store.open(), self.store.open()]
        for ledger in self.ledgers:
            ledger.create_run(NAME, STREAM, UID, "{}")
        self.acquire(True, False)
        if opened:
            self.open(True, 1, 4, 0, "0")

    def teardown(self) -> None:
        self.store.close()

    def _do(self, call: Callable[[], Any], modelled: Callable[[], Outcome]) -> None:
        self.last = (call, modelled)
        expected = modelled()
        found: Outcome
        try:
            found = call()
        except LedgerError as error:
            found = type(error)
        except (Fenced, AttemptUsed) as error:
            found = type(error)
        assert found == expected

    @rule(leads=LEADS, lasts=st.booleans())
    def acquire(self, leads: bool, lasts: bool) -> None:
        """By the server that leads: its own restart. By the other: a takeover, or a refusal while the lease lasts."""
        who = self.leader if leads else 1 - self.leader
        expected = self.model.acquire(who, lasts)
        found: Outcome
        try:
            found = self.ledgers[who].acquire(UID, STREAM, f"server {who}", LONG_S if lasts else 0.0)
        except LedgerError as error:
            found = type(error)
        assert found == expected
        if isinstance(found, int):
            self.leader, self.epochs[who] = who, found

    @rule(leads=LEADS, own=LEADS, lasts=st.booleans(), heard_at=st.sampled_from([None, 1.5]), lag=LAG, known=STEP)
    def renew(self, leads: bool, own: bool, lasts: bool, heard_at: float | None, lag: int, known: int) -> None:
        """``own``: the epoch was not given out a second time."""
        who, epoch = self._server(leads)
        holder = who if own else 1 - who
        generation = self.model.generation - lag
        index = max(0, (self.model.committed or (0, "0"))[0] + known)
        lease_s = LONG_S if lasts else 0.0
        self._do(
            lambda: self.ledgers[who].renew(
                UID, STREAM, epoch, f"server {holder}", lease_s, heard_at, generation, index
            ),
            lambda: self.model.renew(who, epoch, holder, lasts, heard_at, generation, index),
        )

    @rule(leads=LEADS)
    def release(self, leads: bool) -> None:
        who, epoch = self._server(leads)
        self._do(lambda: self.ledgers[who].release(UID, STREAM, epoch), lambda: self.model.release(epoch))

    def _server(self, leads: bool) -> tuple[int, int]:
        who = self.leader if leads else 1 - self.leader
        return who, self.epochs[who]

    @rule(
        leads=LEADS,
        ahead=st.sampled_from([1, 1, 1, 2, 0]),
        start=st.integers(0, 20),
        attempt=st.integers(0, 8),
        order=ORDER,
    )
    def open(self, leads: bool, ahead: int, start: int, attempt: int, order: str) -> None:
        committed = commit_at(start, order)
        opening = opening_of(self.model.generation + ahead, committed, f"attempt-{attempt}")
        who, epoch = self._server(leads)
        self._do(
            lambda: self.ledgers[who].open(UID, STREAM, epoch, opening, committed),
            lambda: self.model.open(epoch, opening, order),
        )

    @rule(leads=LEADS, lag=LAG, step=STEP, order=ORDER, journal=st.booleans(), known=st.sampled_from([-2, 0, 0, 0, 2]))
    def commit(self, leads: bool, lag: int, step: int, order: str, journal: bool, known: int) -> None:
        at, present = self.model.committed or (0, "0")
        index = max(0, at + step)
        name = present if order == "0" else "0f".replace(present, "")  # mostly the order that the generation has
        who, epoch = self._server(leads)
        generation = self.model.generation - lag
        self._do(
            lambda: self.ledgers[who].commit(
                UID, STREAM, epoch, generation, commit_at(index, name), journal, at + known
            ),
            lambda: self.model.commit(epoch, generation, index, name, journal, at + known),
        )

    @rule(step=st.integers(1, 3), journal=st.booleans())
    def go_on(self, step: int, journal: bool) -> None:
        """What a healthy server does most of the time."""
        self.commit(True, 0, step, "0", journal, 0)

    @rule(leads=LEADS, lag=LAG, rank=st.integers(0, 1), nonce=st.sampled_from(["a", "b"]))
    def claim(self, leads: bool, lag: int, rank: int, nonce: str) -> None:
        who, epoch = self._server(leads)
        generation = self.model.generation - lag
        self._do(
            lambda: self.ledgers[who].claim_slot(UID, STREAM, epoch, generation, rank, nonce),
            lambda: self.model.claim(epoch, generation, rank, nonce),
        )

    @rule()
    def repeat(self) -> None:
        """The last call, as after an unknown outcome."""
        if self.last is not None:
            self._do(*self.last)

    @rule(leads=LEADS)
    def thin(self, leads: bool) -> None:
        who, epoch = self._server(leads)
        self._do(lambda: self.ledgers[who].thin_journal(UID, STREAM, epoch), lambda: self.model.thin(epoch))

    @rule(leads=LEADS, pin=st.sampled_from(["{}", '{"at":1}', None]))
    def pin(self, leads: bool, pin: str | None) -> None:
        who, epoch = self._server(leads)
        self._do(lambda: self.ledgers[who].pin(UID, STREAM, epoch, pin), lambda: self.model.set_pin(epoch, pin))

    @rule(leads=LEADS, ahead=st.sampled_from([1, 1, 1, 0, 2, -1]), index=st.integers(0, 3), reason=ORDER)
    def revise(self, leads: bool, ahead: int, index: int, reason: str) -> None:
        who, epoch = self._server(leads)
        revision = revision_of(max(1, len(self.model.revisions) + ahead), index, reason)
        self._do(
            lambda: self.ledgers[who].revise(UID, STREAM, epoch, revision), lambda: self.model.revise(epoch, revision)
        )

    @rule(leads=LEADS, back=st.integers(-1, 2))
    def drop_revisions(self, leads: bool, back: int) -> None:
        who, epoch = self._server(leads)
        number = max(1, len(self.model.revisions) - back)
        self._do(
            lambda: self.ledgers[who].drop_revisions(UID, STREAM, epoch, number),
            lambda: self.model.drop_revisions(epoch, number),
        )

    @rule(leads=LEADS, name=st.sampled_from(["s", "t"]), index=st.integers(0, 2))
    def save_snapshot(self, leads: bool, name: str, index: int) -> None:
        who, _ = self._server(leads)
        snapshot = StoredSnapshot(id=name, sample_index=index, saved_at=index / 4, text=f"{index}")
        self._do(lambda: self.ledgers[who].save_snapshot(UID, STREAM, snapshot), lambda: self.model.save(snapshot))

    @rule()
    def crash(self) -> None:
        self.store.crash()
        self.store.close()
        self.ledgers = [self.store.open(), self.store.open()]

    @invariant()
    def the_store_equals_the_model(self) -> None:
        model = self.model
        ledger: Ledger = self.ledgers[0]
        run = ledger.read_run(NAME, STREAM)
        assert run is not None
        assert (run.uid, run.epoch, run.pin) == (UID, model.epoch, model.pin)
        assert run.lease is not None
        assert run.lease.heard_at == model.heard_at
        assert run.opening == (model.openings[-1] if model.openings else None)
        assert run.committed == (commit_at(*model.committed) if model.committed else None)
        assert list(ledger.revisions(UID, STREAM)) == model.revisions
        sizes = [len(state.encode()) for entries in model.journal.values() for state in entries.values()]
        assert ledger.journal_size(UID, STREAM) == (len(sizes), sum(sizes))

    @rule(at_most=st.integers(0, 40), lag=LAG)
    def look_back(self, at_most: int, lag: int) -> None:
        generation = self.model.generation - lag
        below = {index: state for index, state in self.model.journal.get(generation, {}).items() if index <= at_most}
        entry = self.ledgers[1].journal(UID, STREAM, generation, at_most) if generation > 0 else None
        assert (entry and (entry.sample_index, entry.state)) == (max(below.items()) if below else None)
        assert list(self.ledgers[1].openings(UID, STREAM)) == self.model.openings
        newest_first = sorted(self.model.snapshots.values(), key=lambda each: (-each.saved_at, each.id))
        assert list(self.ledgers[1].snapshots(UID, STREAM)) == newest_first


def _run(make_store: Callable[[], LedgerStore], examples: int) -> None:
    """Failures are not shrunk, which can take minutes: a history has no more than thirty steps."""
    machine: Any = type("Machine", (LedgerMachine,), {"make_store": staticmethod(make_store)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_histories_on_sqlite_equal_the_model(tmp_path: Path) -> None:
    _run(lambda: SqliteStore(tmp_path), 30)


def test_random_histories_on_redis_with_kills_equal_the_model(redis_server: RedisServer) -> None:
    _run(lambda: RedisStore(redis_server), 15)


class SqliteWithoutFence(SqliteLedger):
    def _fence(self, uid: str, stream: str, found: int, generation: int) -> None:
        super()._fence(uid, stream, found, found)


class SqliteWithoutDeduplication(SqliteLedger):
    def _committed_already(self, *_: object) -> None:
        return None


class SqliteWithoutEpochs(SqliteLedger):
    def _led_run(self, connection: Any, uid: str, stream: str, epoch: int) -> tuple[int, int]:
        run = self._run(connection, uid, stream)
        found = connection.execute("SELECT epoch FROM runs WHERE id = ?", (run,)).fetchone()
        return super()._led_run(connection, uid, stream, *found)


def _redis_without(script: str, line: str) -> Callable[[str], Ledger]:
    """A ledger whose script lacks a line."""

    def make(url: str) -> Ledger:
        ledger = RedisLedger(url)
        scripts = ledger._client._scripts
        assert line in scripts[script]
        scripts[script] = scripts[script].replace(line, "if false then" if line.endswith("then") else "")
        return ledger

    return make


class SqliteWithoutLeases(SqliteLedger):
    def _lease(self, connection: Any, run: int) -> None:
        return None


SQLITE_MUTANTS = [SqliteWithoutFence, SqliteWithoutDeduplication, SqliteWithoutEpochs, SqliteWithoutLeases]
REDIS_MUTANTS = {
    "fence": ("commit", "or fenced(ARGV[3])"),
    "deduplication": ("commit", "if had <= tonumber(committed) then return {'ok', committed} end"),
    "digest": (
        "commit",
        "if had == tonumber(committed) and ARGV[8] ~= digest then return {'order', committed, digest} end",
    ),
    "holder": ("renew", "if holder ~= ARGV[7] then return {'twice', holder, field('name')} end"),
    "lease": ("acquire", "if holder and holder ~= ARGV[3] and left > 0 then"),
    "rollback": ("commit", "or rolled_back(ARGV[3], ARGV[5])"),
    "number": ("revise", "if number ~= newest + 1 then return {'revision', newest} end"),
    "index": ("revise", "if tonumber(ARGV[4]) < last then return {'too_early', newest, string.format('%d', last)} end"),
    "attempts": ("open", "if used then return {'used', used} end"),
}


@pytest.mark.parametrize("mutant", SQLITE_MUTANTS)
def test_a_sqlite_ledger_without_a_check_is_caught(mutant: Callable[[Path], Ledger], tmp_path: Path) -> None:
    with pytest.raises((AssertionError, LedgerError)):
        _run(lambda: SqliteStore(tmp_path, mutant), 500)


@pytest.mark.parametrize("missing", REDIS_MUTANTS)
def test_a_redis_ledger_without_a_check_is_caught(missing: str, redis_server: RedisServer) -> None:
    mutant = _redis_without(*REDIS_MUTANTS[missing])
    with pytest.raises((AssertionError, LedgerError)):
        _run(lambda: RedisStore(redis_server, mutant, killed=False), 500)

"""What a store of the ledger owes: everything here holds on SQLite, on a real Redis and in memory alike."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.ledger_data import SPECS, commit_at, opening_of, revision_of
from support.ledger_server import NAME, STREAM, UID, Server, lead
from support.ledger_stores import LedgerStore, MemoryStore, RedisStore, SqliteStore
from support.redis_server import RedisServer
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import (
    AttemptUsed,
    Fenced,
    LeaseHeld,
    LedgerError,
    LedgerRolledBack,
    NotFound,
    NotLeader,
)
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import Counters, RunContents, StoredRun, StoredSnapshot

SNAPSHOT = StoredSnapshot(id="s", sample_index=3, saved_at=1.5, text="{}")


@pytest.fixture(params=["sqlite", "redis", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LedgerStore]:
    made: LedgerStore
    match request.param:
        case "sqlite":
            made = SqliteStore(tmp_path)
        case "redis":
            made = RedisStore(request.getfixturevalue("redis_server"))
        case _:
            made = MemoryStore()
    yield made
    made.close()


# Runs.


def test_a_new_run_has_no_generation_and_nothing_committed(ledger: Ledger) -> None:
    assert ledger.read_run(NAME, STREAM) is None
    created = ledger.create_run(NAME, STREAM, UID, '{"seed":7}')
    assert created == StoredRun(
        name=NAME,
        stream=STREAM,
        uid=UID,
        record='{"seed":7}',
        epoch=0,
        opening=None,
        committed=None,
        committed_at=None,
        pin=None,
        lease=None,
    )
    assert ledger.read_run(NAME, STREAM) == created
    assert (ledger.openings(UID, STREAM), ledger.snapshots(UID, STREAM)) == ([], [])
    assert ledger.journal_size(UID, STREAM) == (0, 0)


def test_creating_a_run_that_is_there_returns_the_one_that_is_there(store: LedgerStore) -> None:
    first = store.open().create_run(NAME, STREAM, UID, '{"made_by":"first"}')
    second = store.open()
    assert second.create_run(NAME, STREAM, "uid-2", '{"made_by":"second"}') == first
    assert second.create_run(NAME, STREAM, UID, '{"made_by":"first"}') == first
    with pytest.raises(NotFound):
        second.execute(commands.Acquire("uid-2", STREAM, "a", 0.0))


def test_many_servers_that_create_one_run_at_once_agree_on_its_uid(store: LedgerStore) -> None:
    ledgers = [store.open() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        runs = pool.map(lambda k: ledgers[k].create_run(NAME, STREAM, f"uid-{k}", "{}"), range(6))
    (uid,) = {run.uid for run in runs}
    assert ledgers[0].execute(commands.Acquire(uid, STREAM, "one", 0.0)) == 1


def test_a_uid_belongs_to_one_run(ledger: Ledger) -> None:
    ledger.create_run(NAME, STREAM, UID, "{}")
    with pytest.raises(LedgerError, match=f"(?s)'other'.*{UID}.*{NAME}"):
        ledger.create_run("other", STREAM, UID, "{}")
    assert ledger.read_run("other", STREAM) is None


def test_run_names_are_sorted_pairs_and_streams_are_apart(ledger: Ledger) -> None:
    assert list(ledger.run_names()) == []
    for name, stream, uid in [("b", "train", "u1"), ("a", "train", "u2"), ("a", "eval", "u2")]:
        ledger.create_run(name, stream, uid, "{}")
    assert list(ledger.run_names()) == [("a", "eval"), ("a", "train"), ("b", "train")]
    ledger.execute(commands.Acquire("u2", "train", "a", 0.0))
    evaluation = ledger.read_run("a", "eval")
    assert evaluation and evaluation.epoch == 0


def test_every_call_for_an_unknown_run_says_so(ledger: Ledger) -> None:
    calls: list[Callable[[], object]] = [
        lambda: ledger.execute(commands.Acquire("nobody", STREAM, "a", 0.0)),
        lambda: ledger.execute(commands.Commit("nobody", STREAM, 1, 1, commit_at(1), True)),
        lambda: ledger.openings("nobody", STREAM),
        lambda: ledger.journal("nobody", STREAM, 1, 5),
        lambda: ledger.journal_size("nobody", STREAM),
        lambda: ledger.revisions("nobody", STREAM),
        lambda: ledger.execute(commands.SaveSnapshot("nobody", STREAM, SNAPSHOT)),
        lambda: ledger.snapshots("nobody", STREAM),
        lambda: ledger.snapshot_count("nobody", STREAM),
        lambda: ledger.snapshot("nobody", STREAM, "s"),
    ]
    for call in calls:
        with pytest.raises((NotFound, LedgerRolledBack), match="nobody") as refusal:
            call()
        # Who names an epoch has got it from this ledger.
        assert isinstance(refusal.value, NotFound) != (
            "no longer in the ledger" in str(refusal.value)
        )


# Server epochs.


def test_each_acquisition_raises_the_epoch_by_one_and_shuts_out_the_one_before(
    store: LedgerStore,
) -> None:
    old = lead(store.open())
    old.open(1, 0)
    old.commit(4)
    old.revise(1, 8)
    new = lead(store.open())
    assert new.epoch == old.epoch + 1 == new.run.epoch
    writes: list[Callable[[], object]] = [
        lambda: old.commit(8),
        lambda: old.open(2, 0),
        lambda: old.revise(2, 8),
        lambda: old.do(commands.Release),
    ]
    for write in writes:
        with pytest.raises(NotLeader, match=r"epoch 2, this server has 1.*Another server"):
            write()
    assert new.committed == commit_at(4)
    assert new.revisions == [revision_of(1, 8)]
    assert new.commit(8) == 8


def test_concurrent_acquisitions_get_different_epochs(store: LedgerStore) -> None:
    ledgers = [store.open() for _ in range(3)]
    with ThreadPoolExecutor(6) as pool:
        servers = pool.map(lambda k: lead(ledgers[k % 3]), range(12))
    assert sorted(server.epoch for server in servers) == list(range(1, 13))


# Leases.


def test_a_lease_keeps_other_servers_out_until_it_lapses_or_is_released(store: LedgerStore) -> None:
    one, two = store.open(), store.open()
    one.create_run(NAME, STREAM, UID, "{}")
    taken = commands.Acquire(UID, STREAM, "one", 1000.0)
    epoch = one.execute(taken)
    with pytest.raises(LeaseHeld, match=r"served by one since 20.* s more unless"):
        two.execute(replace(taken, holder="two"))
    assert one.execute(taken) == epoch + 1  # the same server, started again
    one.execute(commands.Release(UID, STREAM, epoch + 1))
    assert two.execute(commands.Acquire(UID, STREAM, "two", 0.05)) == epoch + 2
    with pytest.raises(NotLeader):
        Server(one, epoch + 1).do(commands.Renew, "one", 1000.0, None, 0, 0)
    time.sleep(0.1)
    late = Server(two, epoch + 2)
    late.do(commands.Renew, "two", 1000.0, 7.25, 0, 0)  # but nobody else had taken it
    with pytest.raises(LeaseHeld):
        one.execute(taken)
    lease = late.run.lease
    assert lease and (lease.holder, lease.heard_at, lease.lasts_s) == ("two", 7.25, 1000)
    assert 900 < lease.lapses_at - lease.acquired_at <= 1001


def test_a_lease_that_would_last_longer_than_it_was_granted_for_has_lapsed(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    def lapse_late(store: LedgerStore) -> None:
        if isinstance(store, SqliteStore):
            with contextlib.closing(sqlite3.connect(store.path)) as file, file:
                file.execute("UPDATE leases SET lapses_at = lapses_at + 7200")
            return
        with redis_server.client() as client:
            client.hset(f"tokenloom:{{{UID}}}:{STREAM}", "lease_lapses_at", str(time.time() + 7200))

    for store in (SqliteStore(tmp_path), RedisStore(redis_server)):
        ledger = store.open()
        ledger.create_run(NAME, STREAM, UID, "{}")
        ledger.execute(commands.Acquire(UID, STREAM, "one", 15.0))
        lapse_late(store)
        assert ledger.execute(commands.Acquire(UID, STREAM, "two", 15.0)) == 2
        store.close()


# Opening a generation.


def test_opening_sets_the_generation_the_committed_state_and_the_first_journal_entry(
    ledger: Ledger,
) -> None:
    server = lead(ledger)
    server.open(1, 12)
    opening = opening_of(1, commit_at(12))
    assert server.run.opening == opening
    assert server.committed == commit_at(12)
    assert server.run.committed_at is not None
    assert ledger.openings(UID, STREAM) == [opening]
    assert (opening.parent_run, opening.batch_plans) == ("", "")
    entry = ledger.journal(UID, STREAM, 1, 12)
    assert entry and entry.state == commit_at(12).state
    assert (entry.generation, entry.sample_index) == (1, 12)
    assert ledger.journal_size(UID, STREAM) == (1, len(commit_at(12).state.encode()))


def test_an_opening_tells_which_run_it_was_forked_from_and_its_batch_plans(ledger: Ledger) -> None:
    server = lead(ledger)
    opening = replace(
        opening_of(1, commit_at(12)), parent_run='{"name":"\u00fc"}', batch_plans='{"accumulate":2}'
    )
    for _ in range(2):
        ledger.execute(commands.Open(UID, STREAM, server.epoch, opening, commit_at(12)))
    assert server.run.opening == opening
    assert list(ledger.openings(UID, STREAM)) == [opening]
    for other in (replace(opening, parent_run=""), replace(opening, batch_plans="")):
        with pytest.raises(AttemptUsed):
            ledger.execute(commands.Open(UID, STREAM, server.epoch, other, commit_at(12)))


def test_an_opening_brings_the_revision_that_its_pin_asked_for_in_one_write(server: Server) -> None:
    server.revise(1, 40)
    server.do(commands.Pin, "{}", 1, known_changes=1)
    skip, opening = revision_of(2, 12, "a restore"), opening_of(2, commit_at(12))
    late = commands.Open(UID, STREAM, server.epoch, opening, commit_at(12), skip, known_changes=0)
    with pytest.raises(LedgerError, match="knows of 0 changes of the revisions, the ledger has 1"):
        server.ledger.execute(late)
    for _ in range(2):
        server.ledger.execute(replace(late, known_changes=1))
        assert (server.run.pin, server.run.opening, server.revisions[1:]) == (None, opening, [skip])


def test_a_new_generation_moves_the_ledger_back_and_replaces_all_counters(server: Server) -> None:
    server.commit(40)
    start = commit_at(8, specs=SPECS[1:])
    server.do(commands.Open, opening_of(2, start), start)
    assert server.committed == start
    assert set(server.committed.counters) == set(SPECS[1:])
    assert [opening.generation for opening in server.ledger.openings(UID, STREAM)] == [1, 2]


@pytest.mark.parametrize("revises", [False, True])
def test_of_several_servers_that_write_at_once_one_has_written(
    store: LedgerStore, revises: bool
) -> None:
    server = lead(store.open())
    ledgers = [store.open() for _ in range(4)]

    def write(k: int) -> bool:
        mine = replace(server, ledger=ledgers[k])
        try:
            if revises:
                mine.revise(1, 8, reason=f"reason {k}")
            else:
                mine.open(1, 4 * k, attempt=f"launch-{k}")
        except LedgerError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        wrote = list(pool.map(write, range(4)))
    assert sum(wrote) == 1
    if revises:
        assert server.revisions == [revision_of(1, 8, f"reason {wrote.index(True)}")]
    else:
        assert server.committed == commit_at(4 * wrote.index(True))


# Commits.


def test_a_commit_takes_and_drops_specs_as_it_names_them(server: Server) -> None:
    for specs in (SPECS[:1], SPECS, SPECS[2:], ()):
        index = server.committed.sample_index + 1
        server.do(commands.Commit, 1, commit_at(index, specs=specs), False)
        assert server.committed == commit_at(index, specs=specs)


def test_the_greatest_integers_are_exact_and_greater_ones_refused(server: Server) -> None:
    greatest = Counters(samples=MAX_COUNTER - 2, rows=MAX_COUNTER - 1, tokens=MAX_COUNTER)
    commit = replace(
        commit_at(1),
        sample_index=MAX_COUNTER - 1,
        total_tokens=MAX_COUNTER,
        counters={SPECS[0]: greatest},
    )
    assert server.do(commands.Commit, 1, commit, True) == MAX_COUNTER - 1
    assert server.committed == commit
    largest = replace(commit, sample_index=MAX_COUNTER)
    assert server.do(commands.Commit, 1, largest, True)
    entry = server.ledger.journal(UID, STREAM, 1, MAX_COUNTER - 1)
    assert entry and entry.sample_index == MAX_COUNTER - 1
    for wrong in (
        replace(commit, sample_index=MAX_COUNTER + 1),
        replace(commit, total_tokens=-1),
        replace(commit, counters={SPECS[0]: replace(greatest, rows=MAX_COUNTER + 1)}),
    ):
        with pytest.raises(LedgerError, match="expected 0 to 9007199254740991"):
            server.do(commands.Commit, 1, wrong, False)


def test_three_thousand_sources_fit_in_one_commit(server: Server) -> None:
    commit = commit_at(5, specs=[f"txt:part-{k}.txt:text" for k in range(3000)])
    server.do(commands.Commit, 1, commit, False)
    assert server.committed == commit


def test_threads_that_commit_at_once_leave_the_newest_state(store: LedgerStore) -> None:
    server = lead(store.open())
    server.open(1, 0)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.commit, range(1, 65)))
    assert all(answer >= index for index, answer in enumerate(answers, 1))
    assert server.committed == commit_at(64)


def test_everything_is_there_after_the_store_crashed(store: LedgerStore) -> None:
    server = lead(store.open())
    server.open(1, 0)
    server.claim(0, "n")
    server.commit(8, journal=True)
    server.do(commands.Pin, '{"pin":1}', 1)
    server.ledger.execute(commands.SaveSnapshot(UID, STREAM, SNAPSHOT))
    server.revise(1, 8)
    server.revise(2, 8)
    server.revise(3, 12)
    server.drop(3)
    before = server.run
    store.crash()
    after = replace(server, ledger=store.open())
    assert after.run == before
    assert after.revisions == [revision_of(1, 8), revision_of(2, 8)]
    assert after.ledger.journal_size(UID, STREAM)[0] == 2
    with pytest.raises(AttemptUsed):
        after.claim(0, "m")
    assert after.ledger.snapshot(UID, STREAM, "s") is not None
    assert after.commit(9) == 9


def test_several_commands_at_once_are_each_written_or_refused(store: LedgerStore) -> None:
    server = lead(store.open())
    server.open(1, 0)
    server.claim(1, "n")
    claims = [commands.ClaimSlot(UID, STREAM, server.epoch, 1, rank, "m") for rank in range(4)]
    first, refused, *rest = server.ledger.execute_all(claims)
    assert [first, *rest] == [0, 0, 0]
    assert isinstance(refused, AttemptUsed)
    store.crash()
    after = replace(server, ledger=store.open())
    after.claim(1, "n")
    for rank in (0, 2, 3):
        with pytest.raises(AttemptUsed):
            after.claim(rank, "n")
    over = [replace(claim, generation=2) for claim in claims]
    assert [type(answer) for answer in after.ledger.execute_all(over)] == [LedgerRolledBack] * 4


# Revisions.


def test_revisions_are_of_one_stream_oldest_first_and_outlast_generations_and_leaders(
    store: LedgerStore,
) -> None:
    server = lead(store.open())
    server.revise(1, 4)  # before the first generation
    server.open(1, 0)
    server.revise(2, 8)
    server.open(2, 0)
    new = lead(store.open())
    assert new.revisions == [revision_of(1, 4), revision_of(2, 8)]
    new.revise(2, 8)
    new.revise(3, 8)
    new.revise(4, 100)
    assert new.revisions == [
        revision_of(number, at) for number, at in ((1, 4), (2, 8), (3, 8), (4, 100))
    ]
    new.ledger.create_run(NAME, "eval", UID, "{}")
    assert list(new.ledger.revisions(UID, "eval")) == []


def test_a_drop_that_comes_again_leaves_the_revision_that_has_its_number_since(
    server: Server,
) -> None:
    assert server.revise(1, 8) == 1
    assert server.drop(1) == 2
    assert server.revise(1, 8, "another one") == 3
    assert server.drop(1, known=1) == 3
    assert server.revisions == [revision_of(1, 8, "another one")]
    with pytest.raises(
        LedgerError,
        match="knows of 0 changes of the revisions, the ledger has 3: one was made or dropped",
    ):
        server.revise(1, 8, known=0)  # so does the revision that was dropped
    assert server.drop(1, known=3) == 4
    with pytest.raises(
        LedgerError,
        match=r"no revision yet, .* knows of 2 changes of the revisions, the ledger has 4",
    ):
        server.revise(1, 8, "another one", known=2)
    assert server.revisions == []
    assert server.run.revision_changes == 4


def test_a_revision_closes_the_generation_that_it_names_until_the_next_opening(
    server: Server,
) -> None:
    server.open(1, 0)
    server.commit(4)
    with pytest.raises(LedgerRolledBack, match="the ledger is at generation 1"):
        server.revise(1, 4, closes=2)
    assert server.revise(1, 4, closes=1) == 1
    assert (server.run.closed_generation, server.committed) == (1, commit_at(4))
    for late in (
        lambda: server.commit(6),
        lambda: server.claim(0, "nonce"),
        lambda: server.revise(2, 4, closes=1),
    ):
        with pytest.raises(
            Fenced, match="at generation 1, which was closed: by a revision while nobody trained"
        ):
            late()
    server.revise(2, 4)
    server.open(2, 4)
    server.claim(0, "nonce", 2)
    assert server.commit(6, 2) == 6


# Snapshots.


def test_snapshots_are_kept_newest_first_and_never_change(server: Server) -> None:
    saved = [
        StoredSnapshot(id=f"s{k}", sample_index=k, saved_at=1700000000.125 + k, text=f'{{"ü":{k}}}')
        for k in range(3)
    ]
    for snapshot in saved:
        server.ledger.execute(commands.SaveSnapshot(UID, STREAM, snapshot))
    server.ledger.execute(
        commands.SaveSnapshot(UID, STREAM, replace(saved[1], saved_at=1800000000.0))
    )
    with pytest.raises(LedgerError, match="s1 is in the ledger with another text"):
        server.ledger.execute(commands.SaveSnapshot(UID, STREAM, replace(saved[1], text="{}")))
    assert list(server.ledger.snapshots(UID, STREAM)) == saved[::-1]
    assert server.ledger.snapshot_count(UID, STREAM) == len(saved)
    assert server.ledger.snapshot(UID, STREAM, "s1") == saved[1]
    assert server.ledger.snapshot(UID, STREAM, "s9") is None


# Adopting a uid.


def test_a_run_without_a_generation_takes_the_uid_of_a_trainers_state(store: LedgerStore) -> None:
    server = lead(store.open())
    other = lead(store.open())  # the leader now; both know the uid of before
    other.do(commands.Pin, "{}", 1)
    other.revise(1, 8)
    other.do(commands.Adopt, "uid-from-elsewhere")
    other.do(commands.Adopt, "uid-from-elsewhere")  # a repetition
    new = ("uid-from-elsewhere", STREAM)
    epoch = other.epoch
    assert (other.run.uid, other.run.epoch, other.run.pin) == (new[0], epoch, "{}")
    for ledger in (server.ledger, other.ledger, store.open()):
        by_the_old: list[Callable[[], object]] = [
            partial(replace(other, ledger=ledger).commit, 1),
            partial(ledger.openings, UID, STREAM),
            partial(ledger.revisions, UID, STREAM),
            partial(ledger.execute, commands.Acquire(UID, STREAM, "one", 0.0)),
        ]
        for call in by_the_old:
            with pytest.raises(NotLeader, match="took the uid uid-from-elsewhere"):
                call()
    with pytest.raises(NotLeader):
        server.do(commands.Adopt, new[0])
    start, execute = commit_at(20), other.ledger.execute
    assert execute(commands.Revise(*new, epoch, revision_of(2, 8), known_changes=1)) == 2
    execute(commands.Open(*new, epoch, opening_of(6, start), start))
    assert execute(commands.Commit(*new, epoch, 6, commit_at(24), True)) == 24
    fresh = store.open()
    assert fresh.execute(commands.Acquire(*new, "a", 0.0)) == epoch + 1
    assert fresh.journal_size(*new)[0] == 2
    assert list(fresh.revisions(*new)) == [revision_of(1, 8), revision_of(2, 8)]
    assert other.committed == commit_at(24)
    assert fresh.create_run(NAME, STREAM, "uid-7", "{}").uid == new[0]


def test_a_uid_may_be_adopted_again_and_back(ledger: Ledger) -> None:
    server = lead(ledger)
    for before, after in (
        (UID, "uid-2"),
        ("uid-2", "uid-3"),
        ("uid-3", "uid-3"),
        ("uid-3", UID),
        (UID, "uid-2"),
    ):
        ledger.execute(commands.Adopt(before, STREAM, server.epoch, after))
        assert server.run.uid == after
    with pytest.raises(NotLeader, match="took the uid uid-2"):
        ledger.openings("uid-3", STREAM)


def test_a_uid_that_another_run_has_is_not_adopted(ledger: Ledger) -> None:
    server = lead(ledger)
    ledger.create_run("other", STREAM, "uid-other", "{}")
    with pytest.raises(LedgerError, match=r"uid-other.*'other'"):
        ledger.execute(commands.Adopt(UID, STREAM, server.epoch, "uid-other"))
    ledger.execute(commands.Adopt(UID, STREAM, server.epoch, "uid-2"))
    ledger.create_run("third", STREAM, "uid-third", "{}")
    with pytest.raises(LedgerError, match="uid-2"):
        epoch = ledger.execute(commands.Acquire("uid-third", STREAM, "a", 0.0))
        ledger.execute(commands.Adopt("uid-third", STREAM, epoch, "uid-2"))
    with pytest.raises(LedgerError, match="uid-2"):
        ledger.create_run("fourth", STREAM, "uid-2", "{}")
    assert server.run.uid == "uid-2"


# Whole runs, as backups and other ledgers have them.


def _full(ledger: Ledger) -> Server:
    """A run that has something of everything."""
    server = lead(ledger)
    server.open(1, 0)
    server.claim(0, "n")
    server.commit(4, journal=True)
    server.revise(1, 8)
    ledger.execute(commands.Pin(UID, STREAM, server.epoch, "{}", 1, known_changes=1))
    ledger.execute(commands.SaveSnapshot(UID, STREAM, SNAPSHOT))
    return server


def _contents(ledger: Ledger) -> RunContents:
    contents = ledger.read_all(NAME, STREAM)
    assert contents is not None
    return contents


def _lists(contents: RunContents) -> tuple[object, ...]:
    lists = (contents.openings, contents.journal, contents.revisions, contents.snapshots)
    return contents.slots, *map(list, lists), contents.run.committed, contents.run.record


def test_a_run_is_read_as_a_whole_and_goes_to_every_kind_of_ledger(
    ledger: Ledger, tmp_path: Path, redis_server: RedisServer
) -> None:
    assert ledger.read_all(NAME, STREAM) is None
    server = _full(ledger)
    contents = _contents(ledger)
    assert contents.run == server.run
    assert [(each.generation, each.sample_index) for each in contents.journal] == [(1, 0), (1, 4)]
    assert (len(contents.openings), len(contents.revisions), len(contents.snapshots)) == (1, 1, 1)
    for other in (SqliteStore(tmp_path), RedisStore(redis_server), MemoryStore()):
        target = other.open()
        target.create_run("another", STREAM, "uid-9", "{}")
        assert target.execute(commands.Import(UID, STREAM, contents)) == server.epoch + 1
        assert _lists(_contents(target)) == _lists(contents)
        stored = target.read_run(NAME, STREAM)
        assert stored == replace(contents.run, epoch=server.epoch + 1, lease=None)
        assert target.journal_size(UID, STREAM) == (
            2,
            sum(len(each.state.encode()) for each in contents.journal),
        )
        # It goes on where it was, under a new server, and in the same generation.
        again = Server(target, target.execute(commands.Acquire(UID, STREAM, "two", 0.0)))
        assert again.commit(8) == 8
        again.claim(0, "n")
        with pytest.raises(AttemptUsed):
            again.open(2, 8, "attempt-1")
        again.open(2, 8)
        assert target.store_faults() == []
        with pytest.raises(
            LedgerError, match=rf"'{NAME}', stream train, is in this ledger already.*sample index 8"
        ):
            target.execute(commands.Import(UID, STREAM, contents))
        other.close()


def test_a_backup_shuts_out_all_servers_and_launches_that_it_or_the_ledger_knows(
    ledger: Ledger,
) -> None:
    old = _full(ledger)
    contents = _contents(ledger)
    old.open(2, 4)
    old.open(3, 4)
    old.commit(12, 3)
    restored = ledger.execute(
        commands.Import(UID, STREAM, contents, from_backup=True, replace=True)
    )
    assert restored > old.epoch + 1000
    run = old.run
    assert run.committed == contents.run.committed
    assert (run.pin, run.lease, run.closed_generation) == (None, None, 3)
    assert _contents(ledger).slots == {}
    with pytest.raises(NotLeader):
        old.commit(16, 3)
    new = Server(ledger, ledger.execute(commands.Acquire(UID, STREAM, "one", 0.0)))
    for generation in (1, 3):
        for call in (partial(new.commit, 16), partial(new.claim, 0, "n")):
            with pytest.raises((Fenced, LedgerRolledBack)):
                call(generation)
        with pytest.raises(LedgerError, match="expected 4 or more"):
            new.open(generation, 4, "another")
    new.open(4, 4, "another")
    assert new.commit(8, 4) == 8


def test_a_backup_replaces_a_run_that_a_server_began_anew_meanwhile(ledger: Ledger) -> None:
    _full(ledger)
    contents = _contents(ledger)
    contents = replace(contents, run=replace(contents.run, name="moved", uid="uid-2"))
    ledger.create_run("moved", STREAM, "uid-fresh", "{}")
    epoch = ledger.execute(commands.Acquire("uid-fresh", STREAM, "two", 60.0))
    restore = commands.Import("uid-2", STREAM, contents, from_backup=True, replace=True)
    with pytest.raises(LeaseHeld, match="served by two"):
        ledger.execute(restore)
    ledger.execute(commands.Release("uid-fresh", STREAM, epoch))
    ledger.execute(restore)
    run = ledger.read_run("moved", STREAM)
    assert run and (run.uid, run.committed) == ("uid-2", contents.run.committed)
    with pytest.raises(NotLeader, match="took the uid uid-2"):
        ledger.execute(commands.Release("uid-fresh", STREAM, epoch))
    assert len(list(ledger.openings("uid-2", STREAM))) == 1
    taken = replace(contents, run=replace(contents.run, name="third"))
    with pytest.raises(LedgerError, match=r"'third'.*uid-2.*'moved'"):
        ledger.execute(commands.Import("uid-2", STREAM, taken, replace=True))

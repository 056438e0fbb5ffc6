"""What only the SQLite ledger can meet: files that are no ledgers, folders that are missing, locks."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ledger_data import commit_at
from support.ledger_server import NAME, STREAM, UID, Server, lead
from tokenloom_server.errors import (
    ConfigError,
    LeaseHeld,
    LedgerError,
    LedgerRolledBack,
    LedgerUnavailable,
    NotLeader,
)
from tokenloom_server.ledger import sqlite_file
from tokenloom_server.ledger.commands import Acquire, Pin
from tokenloom_server.ledger.open import open_ledger
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_tools.ledger import back_up, run_faults, saved_runs, store_faults

HELD = Acquire(UID, STREAM, "one", 500.0)


def test_a_relative_url_is_relative_to_the_base_folder_and_an_absolute_one_is_not(
    tmp_path: Path,
) -> None:
    for url, path in [
        ("sqlite:///led%20ger.db", tmp_path / "led ger.db"),
        (f"sqlite:///{tmp_path}/absolute.db", tmp_path / "absolute.db"),
    ]:
        with closing(open_ledger(url, tmp_path)) as ledger:
            ledger.check()
            assert path.exists()
            assert ledger.description == f"sqlite:///{path}"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "tokenloom.db",
        "postgres://host/db",
        "unix:///",
        "sqlite:",
        "sqlite:///",
        "sqlite://host/file.db",
        "sqlite:///:memory:",
        "sqlite:///file.db?mode=ro",
        "redis://host:notaport/0",
        "redis://host:99999/0",
        "redis://host/name",
        "redis://host/0?decode_responses=0",
    ],
)
def test_a_url_that_names_no_ledger_is_refused_with_what_is_expected(
    url: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"expected auto, sqlite:///relative\.db.*redis://"):
        open_ledger(url, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["redis://me:s3cret@host:x/0", "redsi://me:s3cret@host/0", "redis://me:s3/cr3t@host:1/x"]
)
def test_a_refused_url_is_shown_without_its_password(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_ledger(url, tmp_path)
    assert "s3" not in str(caught.value)


def test_a_missing_folder_and_a_folder_in_the_place_of_the_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder .*/nowhere does not exist"):
        open_ledger("sqlite:///nowhere/tokenloom.db", tmp_path)
    with pytest.raises(ConfigError, match="is a folder"):
        open_ledger(f"sqlite:///{tmp_path}", tmp_path)


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("shopping list: " + "milk " * 1000)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"notes\.txt is not a SQLite database"):
        SqliteLedger(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"photos\.db is a SQLite database, but not a ledger"):
        SqliteLedger(path)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, 0o644)


@pytest.mark.parametrize("version", [1, 11, 13])
def test_another_schema_is_refused_by_its_number_and_left_as_it_is(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "tokenloom.db"
    SqliteLedger(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(
        LedgerError, match=f"has schema version {version}, this release has 12: .* or give another"
    ):
        SqliteLedger(path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_an_error_and_not_an_empty_ledger(tmp_path: Path) -> None:
    path = tmp_path / "tokenloom.db"
    with closing(SqliteLedger(path)) as ledger:
        lead(ledger)
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(LedgerError, match="damaged"), closing(SqliteLedger(path)) as ledger:
        ledger.read_run(NAME, STREAM)


def test_a_file_that_another_process_holds_locked_is_unavailable_for_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "tokenloom.db"
    with (
        closing(SqliteLedger(path)) as ledger,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        server = lead(ledger)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerUnavailable, match="locked"):
            server.revise(1, 8)
        assert server.revisions == []
        other.execute("ROLLBACK")
        assert server.revise(1, 8) == 1


def test_a_full_disk_is_unavailable_and_loses_nothing(tmp_path: Path) -> None:
    with closing(SqliteLedger(tmp_path / "tokenloom.db")) as ledger:
        server = lead(ledger)
        server.open(1, 0)
        with ledger._file.reading() as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LedgerUnavailable, match="full"):
            server.do(Pin, "x" * 1_000_000, 1)
        assert server.commit(4) == 4
        assert (server.committed, server.run.pin) == (commit_at(4), None)


def test_a_closed_ledger_is_unavailable(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "tokenloom.db")
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerUnavailable, match="closed"):
        ledger.run_names()


def test_servers_that_make_the_file_at_once_share_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        ledgers = list(pool.map(lambda _: SqliteLedger(tmp_path / "tokenloom.db"), range(6)))
    for k, ledger in enumerate(ledgers):
        ledger.check()
        ledger.create_run(f"run-{k}", "train", f"uid-{k}", "{}")
    assert len(ledgers[0].run_names()) == 6
    for ledger in ledgers:
        ledger.close()


#: Commits as fast as it can and prints each index that was acknowledged.
_COMMITTER = """
import sys
import time
from pathlib import Path
from support.ledger_server import lead
from tokenloom_server.errors import NotLeader
from tokenloom_server.ledger.sqlite import SqliteLedger

server = lead(SqliteLedger(Path(sys.argv[1])))
run = server.run
generation = run.opening.generation + 1 if run.opening else 1
index = run.committed.sample_index if run.committed else 0
server.open(generation, index)
try:
    while True:
        index = server.commit(index + 1, generation, journal=index % 7 == 0)
        print(index, flush=True)
        time.sleep(0.001)  # no server commits without a pause, and SQLite has no queue for who else wants to write
except NotLeader:
    print("not leader", flush=True)
"""


@contextmanager
def _committer(path: Path) -> Iterator[subprocess.Popen[str]]:
    folders = [str(Path(__file__).parent.parent)]
    code = f"import sys; sys.path[:0] = {folders!r}\n{_COMMITTER}"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def test_no_acknowledged_commit_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "tokenloom.db"
    acknowledged = 0
    for lines in (1, 40, 17):
        with _committer(path) as child:
            read = [child.stdout.readline() for _ in range(lines)]
            child.kill()
            read += child.stdout.readlines()
        acknowledged = max(int(line) for line in read if line.endswith("\n"))
        with closing(SqliteLedger(path)) as ledger:
            committed = Server(ledger, 0).committed
        assert acknowledged <= committed.sample_index
        assert committed == commit_at(committed.sample_index)
    assert acknowledged > 0


def test_of_two_server_processes_on_one_file_the_later_one_commits_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokenloom.db"
    with _committer(path) as first:
        first.stdout.readline()
        with closing(SqliteLedger(path)) as ledger:
            server = lead(ledger)
            before = server.run
            assert first.stdout.readlines()[-1] == "not leader\n"
            assert first.wait(timeout=60) == 0
            assert server.run == before
            with pytest.raises(NotLeader):
                replace(server, epoch=server.epoch - 1).commit(10**6)
            index = server.committed.sample_index + 1
            assert server.commit(index) == index


def test_a_commit_waits_for_another_process_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "tokenloom.db"
    with (
        closing(SqliteLedger(path)) as ledger,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        server = lead(ledger)
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.revise, 1, 8)
            deadline = time.monotonic() + 0.1
            while time.monotonic() < deadline:
                assert not waiting.done()
                time.sleep(0.01)
            other.execute("ROLLBACK")
            assert waiting.result(timeout=60) == 1


@pytest.mark.parametrize("link", [False, True])
def test_the_files_of_a_ledger_are_their_owners_alone(
    tmp_path: Path, link: bool, caplog: Any
) -> None:
    path = named = tmp_path / "ledger" / "tokenloom.db"
    path.parent.mkdir()
    if link:
        named = tmp_path / "link.db"
        named.symlink_to(path)
    with closing(SqliteLedger(named)):
        assert [file.stat().st_mode & 0o777 for file in path.parent.iterdir()] == [
            0o600
        ] * 3 and not caplog.records
        for file in path.parent.iterdir():
            file.chmod(0o644)
        with closing(SqliteLedger(named)):
            assert [file.stat().st_mode & 0o777 for file in path.parent.iterdir()] == [0o600] * 3
    assert (
        f"the ledger's file {path} has mode 0644, so others may use it: it is made 0600"
        in caplog.text
    )


@contextmanager
def _changed(path: Path, how: str) -> Iterator[None]:
    """The ledger's file is taken away from under those who have it open, and perhaps another one put in its place."""
    if how == "its log deleted":
        Path(f"{path}-wal").unlink()
        yield
        return
    if how == "behind a link":
        path = path.resolve()
    for each in path.parent.glob(f"{path.name}*"):
        each.rename(each.with_name(f"old-{each.name}"))
    if how == "its folder deleted":
        shutil.rmtree(path.parent)
    if how != "replaced":
        yield
        return
    with closing(SqliteLedger(path)) as other:
        other.create_run(NAME, STREAM, "uid-of-another", "{}")
        yield
        assert other.read_run(NAME, STREAM) is not None
        assert Path(f"{path}-wal").exists()


@pytest.mark.parametrize(
    "how", ["deleted", "behind a link", "replaced", "its log deleted", "its folder deleted"]
)
def test_a_file_that_was_deleted_or_replaced_while_it_was_open_is_a_ledger_that_lost_data(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "folder" / "ledger.db"
    path.parent.mkdir()
    if how == "behind a link":
        path.symlink_to(tmp_path / "elsewhere.db")
    with closing(SqliteLedger(path)) as ledger:
        server = lead(ledger)
        before = ledger.identity()
        with _changed(path, how):
            assert ledger.identity() != before
            if how == "its folder deleted":
                for _ in range(2):
                    with pytest.raises(ConfigError, match=r"folder .* does not exist"):
                        server.do(Pin, "here", 1)
                path.parent.mkdir()
            with pytest.raises(
                LedgerRolledBack, match=r"deleted, moved or replaced .* Bring its data back"
            ):
                server.do(Pin, "here", 1)
            # From now on it is the file that everybody finds there.
            stored = ledger.read_run(NAME, STREAM)
            uids = {"replaced": "uid-of-another", "its log deleted": UID}
            assert (stored and stored.uid) == uids.get(how)
            ledger.create_run("further", STREAM, "uid-2", "{}")
        with closing(SqliteLedger(path)) as third:
            assert third.read_run("further", STREAM) is not None


def test_an_hour_by_which_the_wall_clock_is_set_moves_no_lease_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_clock = time.time
    with closing(SqliteLedger(tmp_path / "ledger.db")) as ledger:
        lead(ledger)
        ledger.execute(HELD)
        for skew_s in (3600, -3600):
            monkeypatch.setattr(time, "time", lambda skew_s=skew_s: wall_clock() + skew_s)
            with closing(SqliteLedger(tmp_path / "ledger.db")) as other:
                assert abs(other.clock() - ledger.clock()) < 100
                with pytest.raises(LeaseHeld, match=r"lasts (500|4\d\d)\.\d s more"):
                    other.execute(replace(HELD, holder="b"))


def test_a_container_whose_monotonic_clock_is_its_own_takes_no_lease_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, namespace, monotonic = tmp_path / "ledger.db", tmp_path / "time", time.monotonic
    namespace.symlink_to("time:[7]")
    with closing(SqliteLedger(path)) as ledger:
        lead(ledger)
        ledger.execute(HELD)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_file, "_TIME_NAMESPACE", namespace)
            patch.setattr(time, "monotonic", lambda: monotonic() + 86400)
            with (
                closing(SqliteLedger(path)) as other,
                pytest.raises(LeaseHeld, match=r"lasts (500|4\d\d)\.\d s more"),
            ):
                other.execute(replace(HELD, holder="b"))
        with closing(SqliteLedger(path)) as third:
            assert third.clock() == pytest.approx(ledger.clock(), abs=100)


def test_after_another_start_of_the_machine_the_wall_clock_says_what_time_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_clock, boot = time.time, tmp_path / "boot_id"
    monkeypatch.setattr(sqlite_file, "_BOOT_ID", boot)
    for skew_s in (0, 3600, -3600):
        boot.write_text(f"boot {skew_s}\n", encoding="ascii")
        monkeypatch.setattr(time, "time", lambda skew_s=skew_s: wall_clock() + skew_s)
        with closing(SqliteLedger(tmp_path / "ledger.db")) as ledger:
            assert abs(ledger.clock() - time.time()) < 100
    boot.unlink()
    monkeypatch.setattr(time, "time", lambda: 7.0)
    with closing(SqliteLedger(tmp_path / "ledger.db")) as ledger:
        assert ledger.clock() == 7.0


@pytest.mark.parametrize("in_use", [True, False])
def test_a_ledger_on_a_full_disk_can_be_checked_and_saved_and_a_new_one_leaves_no_file(
    in_use: bool, tmp_path: Path
) -> None:
    path, new = tmp_path / "ledger.db", tmp_path / "new.db"
    with closing(SqliteLedger(path)) as ledger:
        lead(ledger)
        if not in_use:
            ledger.close()
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (0, former[1])
        )  # no file grows, as on a full disk
        try:
            with pytest.raises(LedgerUnavailable, match="free space"):
                SqliteLedger(new)
            full = open_ledger(f"sqlite:///{path}", tmp_path, must_exist=True)
            faults = [*store_faults(full), *run_faults(full, NAME, STREAM)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        with closing(full):
            back_up(full, [(NAME, STREAM)], tmp_path / "backup")
        assert next(saved_runs(tmp_path / "backup", None)).run.name == NAME
        # It cannot be written to, so that no server may begin on it.
        assert [fault.partition(":")[0] for fault in faults] == (
            [] if in_use else ["LedgerUnavailable"]
        )
        assert not list(tmp_path.glob("new.db*"))

"""What only the Redis ledger can meet: unsafe settings, absent and unwilling servers; and its keys."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from support.ledger_data import commit_at, opening_of, revision_of
from support.ledger_server import NAME, STREAM, UID, Server, lead
from support.ports import free_port
from support.redis_server import ROOT, RedisServer
from support.tls_front import tls_front
from support.waiting import wait_for
from tokenloom_server.errors import LedgerError, LedgerUnavailable, LedgerUnsafe
from tokenloom_server.ledger import redis_client
from tokenloom_server.ledger.commands import (
    Acquire,
    Adopt,
    Commit,
    Open,
    Pin,
    Revise,
    SaveSnapshot,
    ThinJournal,
)
from tokenloom_server.ledger.open import open_ledger
from tokenloom_server.ledger.records import StoredSnapshot
from tokenloom_server.ledger.redis import RedisLedger
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_tools.ledger import copy_run

SNAPSHOT = StoredSnapshot(id="s", sample_index=3, saved_at=1.5, text="{}")
RUN = f"{NAME}/{STREAM}"


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    """A plain client, as a user's script would have."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as plain:
        yield plain


@pytest.fixture
def server(redis_url: str) -> Iterator[Server]:
    """Leads a run in its first generation."""
    with closing(RedisLedger(redis_url)) as ledger:
        made = lead(ledger)
        made.open(1, 0)
        yield made


@contextmanager
def settings(client: Any, **values: str) -> Iterator[None]:
    """CONFIG SET, taken back at the end; ``appendonly`` with the rewrite that it takes to hold again."""
    before = {
        name: client.config_get(name)[name] for name in (each.replace("_", "-") for each in values)
    }
    try:
        for name, value in values.items():
            client.config_set(name.replace("_", "-"), value)
        yield
    finally:
        for name, value in before.items():
            client.config_set(name, value)
        wait_for(
            lambda: not client.info("persistence")["aof_rewrite_in_progress"],
            "the append-only file",
        )


# Keys.


def test_a_plain_client_reads_the_counters_and_the_committed_state(
    server: Server, client: Any
) -> None:
    server.commit(12)
    committed = commit_at(12)
    key = f"tokenloom:{{{client.hget('tokenloom:runs', RUN)}}}:train"
    for kind in ("samples", "rows", "tokens"):
        assert client.hgetall(f"{key}:{kind}") == {
            spec: str(getattr(counters, kind)) for spec, counters in committed.counters.items()
        }
    assert client.hgetall(key).items() >= {
        ("generation", "1"),
        ("epoch", "1"),
        ("sample_index", "12"),
        ("total_tokens", "6144"),
        ("digest", committed.digest),
        ("state", committed.state),
    }


def test_every_key_has_the_runs_hash_tag_and_none_expires(server: Server, client: Any) -> None:
    server.commit(3, journal=True)
    server.claim(0, "nonce")
    server.do(Pin, "{}", 1)
    server.ledger.execute(SaveSnapshot(UID, STREAM, SNAPSHOT))
    server.revise(1, 8)
    lists = "samples rows tokens openings attempts slots journal states snapshots revisions"
    endings = ["", *(f":{each}" for each in lists.split())]
    assert {key: client.ttl(key) for key in client.scan_iter()} == dict.fromkeys(
        [
            "tokenloom:schema",
            "tokenloom:runs",
            *("tokenloom:{uid-1}:train" + each for each in endings),
        ],
        -1,
    )


@pytest.mark.parametrize("version", [None, 1, 3])
def test_another_schema_is_refused_by_its_number_and_left_as_it_is(
    server: Server, client: Any, version: int | None
) -> None:
    assert client.get("tokenloom:schema") == "2"
    server.ledger.check()
    client.delete("tokenloom:schema")
    if version is not None:
        client.set("tokenloom:schema", version)
    found = "none" if version is None else version
    with pytest.raises(
        LedgerError,
        match=f"has schema version {found}, this release has 2: .* or give another ledger",
    ):
        server.ledger.check()


def test_a_write_survives_a_flush_of_the_scripts(server: Server, client: Any) -> None:
    client.script_flush()
    assert server.commit(3) == 3


def test_no_script_is_longer_known_by_another_name(redis_url: str) -> None:
    scripts = redis_client.load_scripts()
    assert len({hashlib.sha1(text.encode()).digest() for text in scripts.values()}) == len(scripts)


def test_all_calls_work_where_keys_of_several_slots_are_refused(tmp_path: Path) -> None:
    """A cluster of one node: it has all slots, and refuses whatever touches two of them at once."""
    node = RedisServer(tmp_path, cluster_enabled="yes").start()
    try:
        plain: Any = redis.Redis(port=node.port)
        with plain as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            wait_for(
                lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"),
                "the cluster",
            )
        with closing(RedisLedger(node.url())) as ledger:
            server = lead(ledger)
            server.do(Adopt, "elsewhere")
            run = ("elsewhere", STREAM)
            ledger.execute(Revise(*run, server.epoch, revision_of(1, 8)))
            ledger.execute(Open(*run, server.epoch, opening_of(1, commit_at(0)), commit_at(0)))
            assert ledger.execute(Commit(*run, server.epoch, 1, commit_at(4), True)) == 4
            assert ledger.journal_size(*run)[0] == 2
            assert list(ledger.revisions(*run)) == [revision_of(1, 8)]
            assert ledger.run_names() == [(NAME, STREAM)]
            assert server.committed == commit_at(4)
    finally:
        node.stop()


# Settings.


@pytest.mark.parametrize(
    ("unsafe", "found"),
    [
        ({"appendonly": "no"}, "appendonly no; expected yes"),
        ({"appendfsync": "everysec"}, "appendfsync everysec; expected always"),
        ({"appendfsync": "no"}, "appendfsync no; expected always"),
        ({"no_appendfsync_on_rewrite": "yes"}, "no-appendfsync-on-rewrite yes; expected no"),
        (
            {"maxmemory_policy": "volatile-lru"},
            "maxmemory-policy volatile-lru; expected noeviction",
        ),
        ({"maxmemory_policy": "allkeys-lfu"}, "maxmemory-policy allkeys-lfu; expected noeviction"),
    ],
)
def test_a_redis_that_can_lose_commits_is_refused_with_the_remedy(
    redis_url: str, client: Any, unsafe: dict[str, str], found: str
) -> None:
    with closing(RedisLedger(redis_url)) as ledger:
        ledger.check()
        with settings(client, **unsafe), pytest.raises(LedgerUnsafe, match=found) as caught:
            ledger.check()
        assert "--appendonly yes --appendfsync always" in str(caught.value)
        ledger.check()


def test_a_redis_whose_file_was_just_switched_on_is_trusted_once_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(
        tmp_path, rdb_key_save_delay="100000"
    ).start()  # microseconds for each key of a rewrite
    try:
        with closing(RedisLedger(server.url())) as ledger, server.client() as plain:
            plain.config_set("appendonly", "no")
            lead(ledger)
            plain.config_set("appendonly", "yes")
            with (
                monkeypatch.context() as patch,
                pytest.raises(LedgerUnsafe, match=r"anew for 0 s.*in_progress:0"),
            ):
                patch.setattr(redis_client, "REWRITE_TIMEOUT_S", 0.0)
                ledger.check()
            ledger.check()
            server.kill()
            assert server.start().client().hexists("tokenloom:runs", RUN)
    finally:
        server.stop()


def test_where_config_is_forbidden_the_ledger_refuses_rather_than_guess(
    redis_url: str, redis_server: RedisServer, client: Any
) -> None:
    client.execute_command(
        "ACL", "SETUSER", "managed", "on", ">s3cret", "~*", "&*", "+@all", "-config"
    )
    url = f"redis://managed:s3cret@127.0.0.1:{redis_server.port}/0"
    try:
        with closing(RedisLedger(url)) as ledger:
            with pytest.raises(
                LedgerUnsafe, match=r"does not show its setting appendfsync.*expected always"
            ):
                ledger.check()
            with (
                settings(client, appendonly="no"),
                pytest.raises(LedgerUnsafe, match="appendonly no; expected yes"),
            ):
                ledger.check()
            client.execute_command("ACL", "SETUSER", "managed", "+config|get")
            ledger.check()
    finally:
        client.execute_command("ACL", "DELUSER", "managed")


def test_a_user_with_what_the_docs_give_it_does_everything_over_tls(
    redis_url: str, redis_server: RedisServer, client: Any, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    name, *rules = re.findall(r"^    user (.*)", text, re.MULTILINE)[0].split()
    client.execute_command("ACL", "SETUSER", name, *rules)
    client.execute_command("ACL", "LOG", "RESET")
    password = next(rule[1:] for rule in rules if rule.startswith(">"))
    ca = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode, context.minimum_version = ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_2
    ca.configure_trust(context)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    own = ca.issue_cert("loader@example.org")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    files = f"ssl_certfile={tmp_path}/own.pem&ssl_keyfile={tmp_path}/own.pem"
    try:
        with tls_front(context, redis_server.port) as port:
            url = f"rediss://{name}:{password}@127.0.0.1:{port}/0?{files}&ssl_ca_certs={tmp_path}/ca.pem"
            with (
                closing(open_ledger(url, tmp_path)) as ledger,
                closing(SqliteLedger(tmp_path / "b.db")) as other,
            ):
                assert ledger.description == f"rediss://127.0.0.1:{port}/0"
                ledger.check()
                server = lead(ledger)
                server.open(1, 0)
                server.claim(0, "n")
                server.commit(4, journal=True)
                server.revise(1, 8)
                server.drop(1)
                ledger.execute(SaveSnapshot(UID, STREAM, SNAPSHOT))
                server.do(ThinJournal)
                assert ledger.snapshots(UID, STREAM) == [SNAPSHOT]
                assert ledger.journal_size(UID, STREAM)[0] == 1
                assert copy_run(ledger, other, NAME, STREAM)
                assert copy_run(other, ledger, NAME, STREAM)
                assert ledger.store_faults() == []
            strange = f"rediss://{name}:{password}@127.0.0.1:{port}/0?{files}"
            with (
                closing(open_ledger(strange, tmp_path)) as ledger,
                pytest.raises(LedgerUnavailable, match="certificate verify failed"),
            ):
                ledger.check()
        refused = [
            log for log in client.execute_command("ACL", "LOG") if log["object"] != "client"
        ]  # it may fail
        assert refused == []
        plain = redis.Redis(port=redis_server.port, username=name, password=password)
        for request in (
            ("FLUSHALL",),
            ("SET", "other", "1"),
            ("KEYS", "*"),
            ("CONFIG", "SET", "appendonly", "no"),
        ):
            with closing(plain), pytest.raises(redis.exceptions.NoPermissionError):
                plain.execute_command(*request)
    finally:
        client.execute_command("ACL", "DELUSER", name)


# Servers that are absent, or do not want.


def test_descriptions_and_errors_show_no_password(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with closing(
        open_ledger(f"redis://me:s3cret@127.0.0.1:{redis_server.port}/2", tmp_path)
    ) as ledger:
        assert ledger.description == f"redis://127.0.0.1:{redis_server.port}/2"
        with pytest.raises(LedgerUnavailable, match="refuses this user") as caught:
            ledger.check()
        assert "s3cret" not in str(caught.value)
    for url, description in [
        ("rediss://:s3cret@host/1", "rediss://host:6379/1"),
        ("redis://host", "redis://host:6379/0"),
        ("redis://[::1]:7000/3?socket_timeout=2", "redis://[::1]:7000/3"),
        ("unix://me:s3cret@/run/redis.sock?db=4", "unix:///run/redis.sock?db=4"),
    ]:
        with closing(open_ledger(url, tmp_path)) as ledger:
            assert ledger.description == description


def test_a_unix_socket_and_another_database_work(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")  # short: a socket's path may have 107 bytes
    server = RedisServer(folder, unixsocket=str(folder / "r.sock")).start()
    try:
        with closing(open_ledger(f"unix://{folder}/r.sock?db=3", tmp_path)) as ledger:
            ledger.check()
            lead(ledger)
        with redis.Redis(port=server.port, db=3) as client:
            assert client.hexists("tokenloom:runs", RUN)
    finally:
        server.stop()


def test_an_unreachable_redis_is_named_with_what_to_do() -> None:
    port = free_port()
    with closing(RedisLedger(f"redis://127.0.0.1:{port}/0")) as ledger:
        for call in (
            ledger.check,
            ledger.run_names,
            lambda: ledger.execute(Acquire(UID, STREAM, "a", 0.0)),
        ):
            with pytest.raises(
                LedgerUnavailable, match=rf"127\.0\.0\.1:{port} cannot be reached.*whether it runs"
            ):
                call()


def test_a_redis_that_stops_in_the_middle_is_unavailable_and_works_again_after_its_restart(
    server: Server, redis_server: RedisServer
) -> None:
    assert server.commit(4) == 4
    redis_server.kill()
    with pytest.raises(LedgerUnavailable, match=f"127.0.0.1:{redis_server.port}"):
        server.commit(5)
    redis_server.start()
    assert server.committed == commit_at(4)
    assert server.commit(5) == 5


def test_a_redis_that_does_not_answer_is_unavailable_within_a_bound(
    server: Server, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "SOCKET_TIMEOUT_S", 0.2)
    with closing(RedisLedger(redis_server.url())) as ledger:
        impatient = replace(server, ledger=ledger)
        assert impatient.commit(1) == 1
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(LedgerUnavailable, match="Timeout"):
                impatient.commit(2)
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        # Whatever became of the timed-out ones, repeating is safe.
        assert impatient.commit(2) == 2
        assert server.committed == commit_at(2)


def test_a_redis_out_of_memory_is_unavailable_and_writes_nothing(
    server: Server, client: Any
) -> None:
    server.commit(4)
    calls: list[Callable[[], object]] = [
        lambda: server.commit(5),
        lambda: server.open(2, 0),
        lambda: server.ledger.execute(Acquire(UID, STREAM, "a", 0.0)),
    ]
    with settings(client, maxmemory="1"):
        for call in calls:
            with pytest.raises(LedgerUnavailable, match="used memory"):
                call()
        assert server.committed == commit_at(4)
    assert server.commit(5) == 5


def test_a_replica_is_unavailable_for_writes(server: Server, client: Any) -> None:
    server.commit(4)
    client.execute_command("REPLICAOF", "127.0.0.1", free_port())
    try:
        with pytest.raises(LedgerUnavailable, match="read only"):
            server.commit(5)
    finally:
        client.execute_command("REPLICAOF", "NO", "ONE")
    assert server.commit(5) == 5


def test_a_busy_redis_is_unavailable(
    redis_server: RedisServer, server: Server, client: Any
) -> None:
    with settings(client, lua_time_limit="1"), redis.Redis(port=redis_server.port) as other:

        def spin_for_ever() -> None:
            with pytest.raises(redis.ResponseError):
                other.eval("while true do end", 0)

        spin = threading.Thread(target=spin_for_ever)
        spin.start()
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    server.ledger.run_names()
                except LedgerUnavailable as error:
                    assert "BUSY" in str(error)
                    break
            else:
                pytest.fail("never busy")
        finally:
            client.script_kill()
            spin.join(timeout=60)
    assert server.commit(5) == 5


def test_keys_of_another_type_or_deleted_ones_are_an_error_and_not_an_absence(
    server: Server, client: Any
) -> None:
    client.set("tokenloom:{other}:train", "text")
    with pytest.raises(LedgerError, match="WRONGTYPE"):
        server.ledger.execute(Acquire("other", STREAM, "a", 0.0))
    client.delete("tokenloom:{uid-1}:train")
    with pytest.raises(LedgerError, match="keys were lost"):
        server.ledger.create_run(NAME, STREAM, "uid-2", "{}")


# Durability.


def test_no_acknowledged_commit_is_lost_when_redis_is_killed(
    server: Server, redis_server: RedisServer
) -> None:
    for lines in (1, 60, 23):
        acknowledged: list[int] = []

        def commit_for_ever(start: int, acknowledged: list[int] = acknowledged) -> None:
            index = start
            while True:
                try:
                    index = server.commit(index + 1, journal=index % 7 == 0)
                except LedgerUnavailable:
                    return
                acknowledged.append(index)

        writer = threading.Thread(target=commit_for_ever, args=(server.committed.sample_index,))
        writer.start()
        wait_for(lambda: len(acknowledged) >= lines, "some commits")  # noqa: B023
        redis_server.kill()
        writer.join(timeout=60)
        assert not writer.is_alive()
        redis_server.start()
        index = server.committed.sample_index
        assert acknowledged[-1] <= index <= acknowledged[-1] + 1
        assert server.committed == commit_at(index)

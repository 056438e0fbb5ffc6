"""``tokenloom ledger``: backups, restores and moves of what real servers wrote, with trainers that go on after them."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from conftest import Corpus, StartServer
from support.redis_server import RedisServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World
from support.waiting import wait_for
from tokenloom_proto.errors import Fenced, LedgerRolledBack, ResumePointNeeded


def committed_at(server: ServerProcess, run: str, sample_index: int) -> None:
    def is_committed() -> bool:
        return int(server.get(f"/v1/runs/{run}/stats")["sample_index"]) == sample_index

    wait_for(is_committed, f"the commit of sample {sample_index}")


def test_a_run_moves_to_another_ledger_and_its_ranks_go_on_where_they_were(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    tokenloom: CommandLine,
    redis_url: str,
) -> None:
    server = start_server(corpus.mixture("mover"))
    old, new = server.ledger, redis_url
    with World(server.url("mover"), 2, 2, reconnect_timeout_s=60) as world:
        world.steps(5)
        generation = world.ranks[0].generation
        refused = tokenloom("ledger", "copy", old, new)
        assert (refused.status, "LeaseHeld" in refused.output) == (2, True), refused.output
        assert "is served by" in refused.output
        server.terminate()
        assert tokenloom("ledger", "copy", old, old).status == 2
        moved = tokenloom("ledger", "copy", old, new)
        assert (moved.status, "run mover, stream train: is in" in moved.output) == (0, True), (
            moved.output
        )
        with pytest.raises(
            RuntimeError,
            match=r"(?s)NotLeader: Run 'mover' is not served from this ledger: it is in",
        ):
            server.start()
        again = tokenloom("ledger", "copy", old, new)
        assert (again.status, "was already in" in again.output) == (0, True), again.output
        server.ledger = new
        server.start()
        world.run()
        assert {rank.generation for rank in world.ranks} == {generation}
        assert world.receipt.sequence() == sequence[: world.sample_index]
        assert len(sequence) - world.sample_index < 4
        digest = world.digest
    server.terminate()
    for url in (old, new):
        checked = tokenloom("ledger", "check", url)
        assert (checked.status, "1 run(s), 0 fault(s)" in checked.output) == (0, True), (
            checked.output
        )
    # The way back, and a trainer that goes on from there.
    assert tokenloom("ledger", "copy", new, old).status == 0
    server.ledger = old
    server.start()
    with World(server.url("mover"), resume="latest") as world:
        world.join()
        assert world.digest == digest


def test_a_backup_of_a_served_run_is_restored_and_nobody_guesses_where_it_was(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    tokenloom: CommandLine,
    tmp_path: Path,
    redis_url: str,
) -> None:
    server = start_server(corpus.mixture("saved", window_micro_steps=6), ledger=redis_url)
    backup = tmp_path / "ledger.backup"
    with World(server.url("saved"), 2, 2, prefetch_steps=1) as world:
        world.steps(3)
        committed_at(server, "saved", 12)
        saved = tokenloom("ledger", "backup", server.ledger, backup)
        assert saved.status == 0, saved.output
        assert backup.stat().st_mode & 0o777 == 0o600
        world.steps(4)
        checkpoint = world.state()
        world.steps(1)
        committed_at(server, "saved", 32)
        live = tokenloom("ledger", "restore", backup, server.ledger, "--replace")
        assert (live.status, "LeaseHeld" in live.output) == (2, True), live.output
        server.terminate()
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        restored = tokenloom("ledger", "restore", backup, server.ledger)
        assert (restored.status, "run saved, stream train: at sample 12" in restored.output) == (
            0,
            True,
        )
        there = tokenloom("ledger", "restore", backup, server.ledger)
        assert (there.status, "is in this ledger already" in there.output) == (2, True), (
            there.output
        )
        server.start()
        with pytest.raises(
            (Fenced, LedgerRolledBack), match="restart the training job from its last checkpoint"
        ):
            world.run()
        taken = world.receipt.sequence()  # one rank may have had a batch more
        assert taken == sequence[: len(taken)]
    with World(server.url("saved")) as guess, pytest.raises(ResumePointNeeded):
        guess.join()
    with World(server.url("saved"), 2, 2, state=checkpoint) as world:
        world.run()
        assert world.ranks[0].generation == 2
        assert world.receipt.sequence(28) == sequence[28 : world.sample_index]
    checked = tokenloom("ledger", "check", server.ledger)
    assert (checked.status, "0 fault(s)" in checked.output) == (0, True), checked.output


@pytest.fixture
def written(corpus: Corpus, start_server: StartServer, redis_url: str) -> ServerProcess:
    """A server that wrote a run to Redis, and ended."""
    server = start_server(corpus.mixture("kept"), ledger=redis_url)
    with World(server.url("kept"), 1, 4) as world:
        world.steps(4)
        committed_at(server, "kept", 16)
    server.terminate()
    return server


def test_a_backup_that_is_not_whole_restores_nothing(
    written: ServerProcess, tokenloom: CommandLine, tmp_path: Path
) -> None:
    backup, target = tmp_path / "ledger.backup", f"sqlite:///{tmp_path}/target.db"
    os.environ["TOKENLOOM_TEST_LEDGER"] = written.ledger
    try:
        assert (
            tokenloom("ledger", "backup", "TOKENLOOM_TEST_LEDGER", backup, "--run", "kept").status
            == 0
        )
    finally:
        del os.environ["TOKENLOOM_TEST_LEDGER"]
    again = tokenloom("ledger", "backup", written.ledger, backup)
    assert (again.status, "a backup replaces no file" in again.output) == (2, True)
    whole = backup.read_bytes()
    lines = gzip.decompress(whole).splitlines()
    other = json.loads(lines[0]) | {"version": 9}
    damaged = {
        "cut": whole[:-9],
        "changed": gzip.compress(
            b"\n".join([lines[0], lines[1].replace(b'"samples":', b'"samples":1'), lines[2]])
        ),
        "short": gzip.compress(b"\n".join([lines[0], lines[2]])),
        "newer": gzip.compress(b"\n".join([json.dumps(other).encode(), *lines[1:]])),
        "foreign": b"{}",
        "empty": b"",
    }
    for name, content in damaged.items():
        file = tmp_path / name
        file.write_bytes(content)
        refused = tokenloom("ledger", "restore", file, target)
        assert (refused.status, "is not a whole backup" in refused.output) == (2, True), (
            name,
            refused.output,
        )
    for run, url in (("other", target), (None, f"sqlite:///{tmp_path}/none/target.db")):
        options = ["--run", run] if run else []
        assert tokenloom("ledger", "restore", backup, url, *options).status == 2
    assert tokenloom("ledger", "copy", written.ledger, target, "--run", "other").status == 2
    assert not list(tmp_path.glob("target.db*")), "what is refused leaves no empty ledger"
    missing = tokenloom("ledger", "check", f"sqlite:///{tmp_path}/none.db")
    assert (missing.status, "does not exist; expected a ledger" in missing.output) == (2, True)
    assert tokenloom("ledger", "restore", backup, target).status == 0
    with closing(sqlite3.connect(tmp_path / "target.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM runs").fetchone() == (1,)


def test_the_check_names_a_fault_with_its_run_and_what_to_do(
    written: ServerProcess, tokenloom: CommandLine, tmp_path: Path
) -> None:
    file = f"sqlite:///{tmp_path}/checked.db"
    assert tokenloom("ledger", "copy", written.ledger, file).status == 0
    with closing(sqlite3.connect(tmp_path / "checked.db")) as connection:
        connection.execute("UPDATE counters SET tokens = tokens - 1000000")
        connection.commit()
    found = tokenloom("ledger", "check", file)
    assert (found.status, "run 'kept', stream train: source" in found.output) == (1, True), (
        found.output
    )
    assert "Restore the run from a backup" in found.output
    client = redis.Redis.from_url(written.ledger)
    with closing(client):
        client.hset("tokenloom:{gone}:train:tokens", "spec", 1)
        client.hset("tokenloom:uids", "nobody/train", "nobody")
        client.config_set("appendfsync", "everysec")
        try:
            found = tokenloom("ledger", "check", written.ledger)
        finally:
            client.config_set("appendfsync", "always")
    assert found.status == 1
    for part in (
        "appendfsync everysec",
        "key tokenloom:{gone}:train:tokens is of no run",
        "uid nobody/train leads to",
    ):
        assert part in found.output


def test_a_replica_that_takes_over_without_the_last_commits_is_refused_until_a_checkpoint_comes(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    tmp_path: Path,
    redis_url: str,
) -> None:
    folder = tmp_path / "replica"
    folder.mkdir()
    replica = RedisServer(folder).start()
    try:
        with replica.client() as client, redis.Redis.from_url(redis_url) as leading:
            client.replicaof("127.0.0.1", str(urlsplit(redis_url).port))
            wait_for(
                lambda: client.info("replication")["master_link_status"] == "up", "the replica"
            )
            server = start_server(
                corpus.mixture("failed-over", window_micro_steps=6), ledger=redis_url
            )
            wait_for(lambda: "replica" in server.log, "the warning that a replica is there")
            with World(
                server.url("failed-over"), 2, 2, prefetch_steps=1, reconnect_timeout_s=60
            ) as world:
                world.steps(3)
                committed_at(server, "failed-over", 12)
                wait_for(lambda: _has(client, "failed-over", 12), "the replica to have it")
                # From here on the replica hears nothing.
                client.replicaof("NO", "ONE")
                world.steps(4)
                checkpoint = world.state()
                # More than a window: what ranks have now was made after commits that the replica lacks, and says so.
                world.steps(5)
                committed_at(server, "failed-over", 48)
                server.kill()
                leading.flushall()
                server.ledger = replica.url()
                server.start()
                with pytest.raises(
                    LedgerRolledBack, match="restart the training job from its last checkpoint"
                ):
                    world.run()
                taken = world.receipt.sequence()
                assert taken == sequence[: len(taken)]
            with World(server.url("failed-over"), 2, 2, state=checkpoint) as world:
                world.run()
                assert world.receipt.sequence(28) == sequence[28 : world.sample_index]
    finally:
        replica.kill()


def _has(client: redis.Redis, run: str, sample_index: int) -> bool:
    uid = client.hget("tokenloom:runs", f"{run}/train")
    return bool(client.hget(f"tokenloom:{{{uid}}}:train", "sample_index") == str(sample_index))

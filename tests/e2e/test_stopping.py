"""A server that is told to stop, and what its log says."""

from __future__ import annotations

import json
import threading
import time

import pytest
from conftest import Corpus, StartServer
from support.trainer import Sample, World


@pytest.mark.parametrize("how", ["terminate", "interrupt"])
def test_a_server_stops_in_bounded_time_with_clients_connected_and_commits_what_they_acknowledged(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, how: str
) -> None:
    run = f"stopped-{how}"
    server = start_server(corpus.mixture(run, window_micro_steps=2))
    with World(server.url(run), 2, 2, prefetch_steps=2) as world:
        world.steps(4)
        late = threading.Thread(target=world.run)  # it waits in next() while the server is away
        began = time.monotonic()
        assert getattr(server, how)() == 0
        assert time.monotonic() - began < 10
        assert not server.ready_file.exists()
        assert "Traceback" not in server.log
        late.start()
        server.start()
        late.join(30)
        assert not late.is_alive()
        kept = len(sequence) // 4 * 4
        assert world.receipt.sequence() == sequence[:kept]


def test_a_server_that_starts_removes_the_ready_file_of_one_that_was_killed(
    corpus: Corpus, start_server: StartServer
) -> None:
    server = start_server(corpus.mixture("ready"))
    server.kill()
    assert server.ready_file.exists()
    stale = server.ready_file.stat().st_mtime_ns
    kept = server.ready_file.read_bytes()
    server.start()
    assert json.loads(server.ready_file.read_text()) == {"grpc": server.grpc, "rest": server.rest, "runs": ["ready"]}
    assert kept == server.ready_file.read_bytes()
    assert server.ready_file.stat().st_mtime_ns > stale
    line = f"tokenloom is ready: gRPC on {server.grpc}, REST and page on http://{server.rest}/ (runs: ready)"
    assert server.log.splitlines().count(line) == 2

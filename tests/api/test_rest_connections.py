"""What a connection to REST may be without a request: few, and not for long."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from support.memory_service import MemoryService
from support.waiting import wait_for
from tokenloom_server.api.auth import Access
from tokenloom_server.api.rest import uvicorn_server
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.tls import Tls
from tokenloom_server.errors import ConfigError

CONTROL = "a" * 32


@pytest.fixture
def server() -> Iterator[RestServer]:
    server = RestServer("127.0.0.1", 0)
    server.start(MemoryService())
    yield server
    server.stop()


def test_connections_of_another_uvicorn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom_server.api.rest.uvicorn_server._PARTS", ("has_moved",))

    with pytest.raises(ConfigError, match=r"no has_moved, .* install uvicorn<0\.55"):
        uvicorn_server.Http(lambda *_: None, 1, None)


SLOW_PARTS = [b"G", b"ET /healthz HTTP/1.1\r\n", b"host: localhost\r\n"]


@pytest.mark.parametrize("parts", [[], SLOW_PARTS])
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_connection_without_a_whole_request_is_closed(
    server: RestServer, monkeypatch: pytest.MonkeyPatch, parts: list[bytes], asked_before: bool
) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        if asked_before:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
        monkeypatch.setattr("tokenloom_server.api.rest.uvicorn_server.SILENT_S", 0.4)
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
                time.sleep(0.1)
        assert reads_to_the_end(connection) == b""


def reads_to_the_end(connection: socket.socket) -> bytes:
    """What comes until the other side closes, or resets."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def test_an_answer_that_is_read_slowly_is_read_to_its_end(
    server: RestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect((host, int(port)))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head = connection.recv(512)
        monkeypatch.setattr("tokenloom_server.api.rest.uvicorn_server.SILENT_S", 0.2)
        time.sleep(0.6)
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len((head + reads_to_the_end(connection)).partition(b"\r\n\r\n")[2]) == length


def test_a_connection_that_asks_on_and_on_and_reads_nothing_is_closed(
    server: RestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.api.rest.uvicorn_server.UNREAD_S", 0.5)
    host, _, port = server.address.rpartition(":")
    request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer_bytes = len(httpx.get(f"{server.url}/openapi.json", trust_env=False, timeout=60).content)
    # More than what the system itself holds for a peer that does not read.
    requests = 2**24 // answer_bytes
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect((host, int(port)))
        with contextlib.suppress(ConnectionError):
            connection.sendall(request * requests)
            time.sleep(2.0)
        assert len(reads_to_the_end(connection)) < requests * answer_bytes / 2


def test_connections_beyond_the_bound_are_closed_while_none_of_the_others_has_a_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.api.rest.server.MAX_CONNECTIONS", 4)
    authority = trustme.CA()
    pem = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
    (tmp_path / "cert.pem").touch(0o600)
    pem.write_to_path(tmp_path / "cert.pem")
    server = RestServer(
        "127.0.0.1",
        0,
        Access(CONTROL, tls=Tls.load(tmp_path / "cert.pem", tmp_path / "cert.pem", None)),
    )
    server.start(MemoryService())
    host, _, port = server.address.rpartition(":")
    try:
        with contextlib.ExitStack() as opened:
            silent = [
                opened.enter_context(socket.create_connection((host, int(port)), 120))
                for _ in range(20)
            ]
            for connection in silent[4:]:
                assert reads_to_the_end(connection) == b"", "closed by the server"
            silent[0].close()
            verify = ssl.create_default_context()
            authority.configure_trust(verify)
            with httpx.Client(base_url=server.url, verify=verify, trust_env=False) as client:
                wait_for(lambda: answers(client), "a place that is free again", 60)
    finally:
        server.stop()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_who_asks_gets_the_place_of_who_does_not_and_health_has_places_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenloom_server.api.rest.uvicorn_server.SILENT_S", 3600.0)
    service = MemoryService(reason="run a: the ledger at redis://10.0.0.1 is away")
    rest = RestServer("127.0.0.1", 0)
    health = RestServer("127.0.0.1", 0, Access(CONTROL), only_health=True)
    for server in (rest, health):
        server.start(service)
    ports = [int(server.address.rpartition(":")[2]) for server in (rest, health)]
    try:
        with (
            contextlib.ExitStack() as opened,
            httpx.Client(base_url=health.url, trust_env=False, timeout=60) as client,
        ):
            for port in ports * 200:
                opened.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            assert httpx.get(f"{rest.url}healthz", trust_env=False, timeout=60).status_code == 200
            assert client.get("/healthz").json()["status"] == "alive"
            assert client.get("/readyz").status_code == 503
            assert "10.0.0.1" not in client.get("/readyz").text
            service.reason = None
            assert client.get("/readyz").json() == {"status": "ready"}
            for path in ("/v1/runs", "/metrics", "/"):
                assert client.get(path).status_code == 401
                assert (
                    client.get(path, headers={"authorization": f"Bearer {CONTROL}"}).status_code
                    == 404
                )
        with pytest.raises(ConfigError, match=r"--health 127.0.0.1:.*another with --health"):
            RestServer("127.0.0.1", ports[0], only_health=True)
    finally:
        rest.stop()
        health.stop()


def test_it_answers_also_where_descriptors_are_above_those_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))  # noqa: PTH123 - a bare file, as a source has
        server = RestServer("127.0.0.1", 0)
        server.start(MemoryService())
        stack.callback(server.stop)
        assert httpx.get(f"{server.url}healthz", trust_env=False, timeout=60).status_code == 200

"""Named tokens over real sockets: for which runs they are good, how they end, and certificates that are replaced."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest
import trustme
import yaml
from prometheus_client import generate_latest
from support.corpora import flat, write_txt
from support.served import over_grpc, runs_of
from support.trainer import World
from support.waiting import wait_for
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.credentials import read_token
from tokenloom_server.api import audit, auth, watched_files
from tokenloom_server.api.auth import Access, Scope
from tokenloom_server.api.grpc import endpoint
from tokenloom_server.api.metrics import create_registry
from tokenloom_server.api.rest.app import create_app
from tokenloom_server.api.rest.routes import Backend
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.service import Runs
from tokenloom_server.api.tls import Tls
from tokenloom_server.api.tokens import create, revoke, watched_tokens
from tokenloom_server.api.watched_files import WatchedFiles, Watcher
from tokenloom_server.errors import ConfigError, Unauthenticated
from tokenloom_tools.cli.serve import tool_routes

MINE, OTHER = "wiki-small", "code"


def look(access: Access) -> None:
    """What the watchers do every second."""
    access.look_at_tokens()
    access.recheck_held()
    if access.tls is not None:
        access.tls.look()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    write_txt(folder / "rows.txt", [f"row {number} " * 8 for number in range(4000)])
    for run in (MINE, OTHER):
        (folder / f"{run}.yaml").write_text(
            yaml.safe_dump(flat(["txt:rows.txt:text"], run=run)), encoding="utf-8"
        )
    with runs_of(folder, *(folder / f"{run}.yaml" for run in (MINE, OTHER))) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def token(file: Path) -> str:
    """Good for everything, of one of the runs."""
    return create(file, "ada", "admin", ["wiki*"], None)


@pytest.fixture
def access(file: Path, token: str) -> Access:
    return Access(named=watched_tokens(file))


@pytest.fixture
def rest(runs: Runs, access: Access, token: str) -> Iterator[httpx.Client]:
    server = RestServer("127.0.0.1", 0, access, routes=tool_routes)
    server.start(runs)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client
    assert server.stop()


# Runs


def test_a_token_for_some_runs_is_good_for_these_on_every_route_and_for_no_other(
    rest: httpx.Client, runs: Runs
) -> None:
    routes = create_app(Backend(runs, "0"), tool_routes())
    assert ("GET", "/v1/runs/{run}/stats") in routes.scopes
    for (method, path), scope in routes.scopes.items():
        values: dict[str, object] = defaultdict(lambda: 1, snapshot_id="s0-1")
        bodies = {
            "restore": {"sample_index": 0},
            "fork": {"parent": OTHER},
            "mixture": {"reason": "because"},
        }
        body = (
            {"json": bodies.get(path.rpartition("/")[2], {})} if method in ("POST", "PATCH") else {}
        )
        if "{run}" in path:
            for run in (OTHER, "nowhere"):
                answer = rest.request(method, path.format_map(values | {"run": run}), **body)
                assert (answer.status_code, answer.json()["error"]) == (403, "Forbidden"), (
                    method,
                    path,
                )
                assert run == OTHER or OTHER not in answer.text
        elif scope is not Scope.OPEN:
            answer = rest.request(method, path, **body)
            assert answer.status_code == (403 if (method, path) in routes.of_all_runs else 200), (
                method,
                path,
            )
        if "{run}" in path and method == "GET":
            assert rest.get(path.format_map(values | {"run": MINE})).status_code not in (
                401,
                403,
            ), path
    assert rest.get("/v1/runs").json()["runs"] == [MINE]
    absent = rest.get("/v1/runs/wiki-gone/stats")
    assert (absent.status_code, OTHER in absent.text) == (404, False)
    # The other run stands in the body.
    forked = rest.post(f"/v1/runs/{MINE}/fork", json={"parent": OTHER})
    assert (forked.status_code, f"not good for run '{OTHER}'" in forked.text) == (403, True)


def test_the_same_on_every_rpc(runs: Runs, access: Access, token: str) -> None:
    metadata = (("authorization", f"Bearer {token}"),)
    service = wire.DESCRIPTOR.services_by_name["DataLoader"]
    with over_grpc(runs, access) as address, grpc.insecure_channel(address) as channel:
        for method in service.methods:
            call = channel.stream_stream(f"/{service.full_name}/{method.name}")
            code = {}
            for run in (MINE, OTHER, "nowhere"):
                request = endpoint.rpcs()[f"/{service.full_name}/{method.name}"].request()
                (request.open if method.name == "Stream" else request).run = run
                ended = call(iter([request.SerializeToString()]), metadata=metadata, timeout=120)
                try:
                    next(ended, None)
                    code[run] = grpc.StatusCode.OK
                except grpc.RpcError as error:
                    code[run] = error.code()
            assert code[OTHER] is code["nowhere"] is grpc.StatusCode.PERMISSION_DENIED, method.name
            assert code[MINE] not in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
            ), method.name
        stats = channel.unary_unary(f"/{service.full_name}/Stats")(
            b"", metadata=metadata, timeout=120
        )
        assert json.loads(wire.StatsResponse.FromString(stats).stats_json)["runs"] == [MINE]


# The file


def test_a_token_is_good_until_it_is_revoked_or_expires(
    file: Path, access: Access, token: str
) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=0.3)
    brief = create(file, "brief", "read", ["*"], soon)
    with pytest.raises(Unauthenticated):
        access.check(f"Bearer {brief}", Scope.READ)
    look(access)
    held = access.check(f"Bearer {brief}", Scope.READ)
    wait_for(lambda: datetime.now(UTC) > soon, "the end")
    for ask in (
        lambda: access.check(f"Bearer {brief}", Scope.READ),
        lambda: access.recheck(held, Scope.READ),
    ):
        with pytest.raises(Unauthenticated, match="'brief' expired at"):
            ask()
    ada = access.check(f"Bearer {token}", Scope.ADMIN)
    revoke(file, "ada")
    look(access)
    with pytest.raises(Unauthenticated, match="the token 'ada' was revoked"):
        access.recheck(ada, Scope.READ)
    assert (file.stat().st_mode & 0o777, token in file.read_text(encoding="utf-8")) == (
        0o600,
        False,
    )


def test_the_file_is_taken_up_as_a_whole_or_not_at_all(
    file: Path, access: Access, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = json.loads(file.read_text(encoding="utf-8"))
    entry = good["tokens"][0]
    faults = {
        "tokens.1.scope": [entry, {**entry, "name": "bob", "sha256": "0" * 64, "scope": "all"}],
        "two tokens have the name ada": [{**entry, "sha256": "1" * 64}, entry],
        "two tokens have the sha256": [{**entry, "name": "bob"}, entry],
        "tokens.0.sha256": [{**entry, "sha256": "abc"}],
        "tokens.0.note": [{**entry, "note": "x"}],
        "tokens.0.runs": [{**entry, "runs": []}],
        "tokens.0.expires": [{**entry, "expires": "2027-01-01T00:00:00"}],
    }
    for fault, tokens in faults.items():
        file.write_text(json.dumps({"tokens": tokens}), encoding="utf-8")
        with caplog.at_level(logging.ERROR):
            look(access)
            look(access)
        assert access.named.is_stale
        assert len(caplog.messages) == 1
        assert fault in caplog.messages[0]
        assert access.check(f"Bearer {token}", Scope.ADMIN).name == "ada"
        with pytest.raises(ConfigError):
            watched_tokens(file)
        caplog.clear()
    for spoil in (
        lambda: file.write_text("{", encoding="utf-8"),
        lambda: file.chmod(0o644),
        file.unlink,
    ):
        spoil()
        look(access)
        assert access.check(f"Bearer {token}", Scope.ADMIN).name == "ada"
    create(file, "eve", "read", ["*"], None)
    look(access)
    assert not access.named.is_stale
    with pytest.raises(Unauthenticated):
        access.check(f"Bearer {token}", Scope.READ)


def test_a_look_that_never_ends_makes_its_own_files_stale_and_stops_no_other(
    runs: Runs,
    file: Path,
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with a disk of a network that hangs."""
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.01)
    other, back, signature_of = tmp_path / "other", threading.Event(), watched_files._signature_of
    other.touch()
    access = Access(
        named=watched_tokens(file),
        tls=cast("Tls", WatchedFiles("--tls-cert", [other], other.read_bytes)),
    )

    def look(path: Path) -> tuple[int, ...]:
        assert path != file or back.wait(120)
        return signature_of(path)

    monkeypatch.setattr(watched_files, "_signature_of", look)
    assert access.tls is not None
    watchers = [Watcher("tokens", access.look_at_tokens), Watcher("certificates", access.tls.look)]
    watchers.append(Watcher("access", partial(access.recheck_held, [access.named, access.tls])))
    monkeypatch.setattr(watched_files, "STALE_S", 2.0)
    for watcher in watchers:
        watcher.start()
    try:
        said = f"--tokens {file}: no look has ended well for 2 s; what it held before stays in force: is its disk away?"
        wait_for(lambda: said in caplog.text, "a line that says so")
        assert (
            "tokenloom_tokens_stale 1.0"
            in generate_latest(create_registry(runs, version="0", access=access)).decode()
        )
        other.write_text("renewed")
        wait_for(
            lambda: cast("Any", access.tls).content == b"renewed", "the other file to be taken up"
        )
        back.set()
        wait_for(
            lambda: f"--tokens {file}: it is looked at again" in caplog.text, "a line that says so"
        )
        assert not access.named.is_stale
    finally:
        back.set()
        for watcher in watchers:
            watcher.end(120)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_as_one_of_tokens_and_no_look_waits_for_it(
    file: Path, access: Access, token: str, make: Callable[[Path], None]
) -> None:
    file.unlink()
    make(file)
    look(access)
    assert access.named.is_stale
    assert access.check(f"Bearer {token}", Scope.ADMIN).name == "ada"
    for read in (watched_tokens, read_token):
        with pytest.raises(
            (ConfigError, ValueError), match=f"{re.escape(str(file))}.* cannot be read"
        ):
            read(file)


# Streams


def test_a_revoked_token_ends_the_streams_of_its_ranks(
    runs: Runs, file: Path, access: Access, token: str
) -> None:
    with over_grpc(runs, access) as address:
        world = World(f"grpc://{address}/{MINE}", 2, token=token, resume="fresh", takeover=True)
        with world:
            world.steps(2)
            revoke(file, "ada")
            look(access)
            for rank in world.ranks:
                with pytest.raises(Unauthenticated, match="the token 'ada' was revoked"):
                    for _ in rank:
                        pass
            view = runs.get(MINE).coordinator.view
            wait_for(
                lambda: {rank.state for rank in view().generation.ranks} == {"away"},
                "that all are away",
            )


def test_calls_whose_client_reads_nothing_end_too(
    runs: Runs, file: Path, access: Access, token: str
) -> None:
    metadata = (("authorization", f"Bearer {token}"),)
    read_all = threading.Event()
    with over_grpc(runs, access) as address, grpc.insecure_channel(address) as channel:
        held = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", metadata=metadata)
        reflection = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        asking = reflection((b"" for _ in iter(read_all.wait, False)), metadata=metadata)
        wait_for(lambda: len(access._held) == 2, "that both have begun")
        look(access)
        assert len(access._held) == 2
        revoke(file, "ada")
        for _ in range(auth.GOODBYE_LOOKS + 1):
            look(access)
        for call in (held, asking):
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() is grpc.StatusCode.CANCELLED
        wait_for(lambda: not access._held, "that nothing is kept of them")
        read_all.set()


# Certificates


def test_new_connections_get_new_certificates_and_open_ones_stay(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key, authority = tmp_path / "cert.pem", tmp_path / "key.pem", trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)

    def issue(*kept: Path) -> None:
        issued = authority.issue_cert("127.0.0.1", "localhost")
        for path, pem in ((cert, issued.cert_chain_pems[0]), (key, issued.private_key_pem)):
            if path not in kept:
                path.unlink(missing_ok=True)
                path.touch(0o600)
                path.write_bytes(pem.bytes())

    def shown_at(address: str) -> bytes:
        host, _, port = address.rpartition(":")
        with context.wrap_socket(
            socket.create_connection((host, int(port)), 120), server_hostname=host
        ) as opened:
            return opened.getpeercert(True) or b""

    issue()
    access = Access("c" * 32, tls=Tls.load(cert, key, None))
    server = RestServer("127.0.0.1", 0, access, routes=tool_routes)
    server.start(runs)
    with (
        over_grpc(runs, access) as address,
        httpx.Client(base_url=server.url, verify=context, trust_env=False, timeout=60) as client,
        World(
            f"grpcs://{address}/{MINE}",
            token="c" * 32,
            tls_ca=trusted(tmp_path, authority),
            resume="fresh",
        ) as world,
    ):
        world.steps(1)
        assert client.get("/healthz").status_code == 200
        first = shown_at(address)
        assert first == shown_at(server.address)
        issue(key)
        look(access)
        assert "cannot be used, so what it held before stays in force" in caplog.text
        assert shown_at(address) == shown_at(server.address) == first
        issue()
        look(access)
        second = shown_at(address)
        assert second == shown_at(server.address) != first
        assert client.get("/healthz").status_code == 200
        world.steps(20)
    assert server.stop()


def trusted(folder: Path, authority: trustme.CA) -> str:
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return os.fspath(folder / "ca.pem")


# The audit log


def audited(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "tokenloom.audit"]


def test_every_change_is_in_the_audit_log_and_among_the_runs_events(
    rest: httpx.Client, runs: Runs, file: Path, access: Access, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tokenloom.audit")
    url = f"/v1/runs/{MINE}"
    index = runs.get(MINE).coordinator.committed_through
    for method, path, body in (
        ("POST", "/restore", {"sample_index": index}),
        ("DELETE", "/restore", None),
        ("POST", "/snapshots", {}),
        (
            "PATCH",
            "/mixture",
            {"reason": "tried", "dry_run": True, "set": [{"child": "rows.txt", "weight": 2}]},
        ),
    ):
        answer = rest.request(method, url + path, json=body)
        assert answer.status_code in (200, 201, 422), answer.text
    with over_grpc(runs, access) as address:
        secret = rest.headers["authorization"].removeprefix("Bearer ")
        with World(
            f"grpc://{address}/{MINE}", token=secret, resume="fresh", takeover=True
        ) as world:
            world.steps(1)
    create(file, "bob", "read", ["*"], None)
    look(access)
    lines = audited(caplog)
    expected = (
        f"run {MINE}: next launch: at sample {index} (before: nothing pinned); by ada at 127.0.0.1:",
        f"run {MINE}: next launch: nothing pinned (before: at sample {index}); by ada at 127.0.0.1:",
        f"run {MINE}: saved the snapshot {index}-",
        f"run {MINE}: opened generation ",
        "tokens: ada, bob (before: ada); by this server",
    )
    assert len(lines) == len(expected), lines
    for line, begin in zip(lines, expected, strict=True):
        assert line.startswith(begin), (line, begin)
        assert secret not in line

    def noted() -> str:
        events = rest.get(f"{url}/events").json()["events"]
        return "\n".join(event["text"] for event in events if event["author"] == "ada")

    wait_for(
        lambda: all(word in noted() for word in ("saved the snapshot", "generation ")),
        "the events of these",
    )


def test_refusals_are_bounded_and_what_they_quote_is_escaped(
    rest: httpx.Client,
    runs: Runs,
    access: Access,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "tokenloom.audit")
    with over_grpc(runs, access) as address, grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/tokenloom.v2.DataLoader/Stats")(b"", timeout=120)
        metadata = (("authorization", rest.headers["authorization"]),)
        with pytest.raises(grpc.RpcError):
            request = wire.StatsRequest(run=OTHER).SerializeToString()
            channel.unary_unary("/tokenloom.v2.DataLoader/Stats")(
                request, metadata=metadata, timeout=120
            )
    for _ in range(30):
        assert (
            rest.get(
                "/v1/runs/a%0Ab%1B[2J/stats", headers={"authorization": "Bearer x"}
            ).status_code
            == 401
        )
    lines = audited(caplog)
    assert len(lines) == audit.MOST_REFUSALS
    assert lines[0].startswith("refused: /tokenloom.v2.DataLoader/Stats from ipv4:127.0.0.1:")
    assert lines[1].startswith("refused: Stats from ipv4:127.0.0.1:")
    assert lines[1].endswith(f": the token 'ada' is not good for run '{OTHER}'; use one that is")
    assert lines[2].startswith("refused: GET /v1/runs/a\\nb\\u001b[2J/stats from 127.0.0.1:")
    monkeypatch.setattr(audit, "REFUSALS_S", 0.0)
    assert rest.get("/metrics").status_code == 403
    assert audited(caplog)[-1].startswith("refused (22 more before): GET /metrics from 127.0.0.1:")

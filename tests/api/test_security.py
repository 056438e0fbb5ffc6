"""Who may do what: asked of every route and every RPC that there is, over real sockets.

The lists come from the app and from the services' descriptors, so that a new route or RPC without a scope fails here.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.corpora import flat, parsed, write_txt
from support.memory_service import MemoryService, run_stats
from support.served import over_grpc, runs_of
from support.waiting import wait_for
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.credentials import (
    MAX_CHARACTERS,
    MIN_CHARACTERS,
    find_token,
    is_loopback,
    read_token,
    refuse_plaintext,
)
from tokenloom_proto.versions import VERSION
from tokenloom_server.api.auth import Access, Scope
from tokenloom_server.api.grpc import endpoint
from tokenloom_server.api.grpc.endpoint import PEEK_CALLS, READ_CALLS
from tokenloom_server.api.grpc.rpc import MAX_REPORT_BYTES, MAX_REQUEST_BYTES, SMALL_REQUEST_BYTES
from tokenloom_server.api.grpc.server import MAX_CALLS
from tokenloom_server.api.page import page_files
from tokenloom_server.api.rest.app import create_app
from tokenloom_server.api.rest.routes import Backend
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.service import Runs
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.errors import (
    ConfigError,
    Forbidden,
    JoinRefused,
    LimitExceeded,
    SnapshotInvalid,
    Unauthenticated,
)
from tokenloom_server.order import snapshot
from tokenloom_server.run import join_call
from tokenloom_server.run.join_call import JoinCall
from tokenloom_tools.cli.app import app
from tokenloom_tools.cli.serve import ServerAccess, tool_routes
from tokenloom_tools.cli.token import make_token
from typer.testing import CliRunner

RUN = "wiki-and-code"
CONTROL, READ = "control-token-0123456789", "read-token-0123456789abc"
#: What a caller may bring, and the scope that it is good for.
BROUGHT: dict[str, tuple[str | None, Scope]] = {
    "nothing": (None, Scope.OPEN),
    "an empty header": ("", Scope.OPEN),
    "the scheme alone": ("Bearer", Scope.OPEN),
    "another token": ("Bearer another-token-0123456789", Scope.OPEN),
    "half of the token": (f"Bearer {CONTROL[:12]}", Scope.OPEN),
    "the token and more": (f"Bearer {CONTROL}x", Scope.OPEN),
    "the token in capitals": (f"Bearer {CONTROL.upper()}", Scope.OPEN),
    "the token without a scheme": (CONTROL, Scope.OPEN),
    "the token as a password": (f"Basic {CONTROL}", Scope.OPEN),
    "the token for reading": (f"Bearer {READ}", Scope.READ),
    "the token for control": (f"Bearer {CONTROL}", Scope.ADMIN),
    "a scheme in small letters": (f"bearer {CONTROL}", Scope.ADMIN),
}

# Tokens


def test_a_token_is_taken_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{CONTROL}\n", encoding="utf-8")
    file.chmod(0o600)

    assert find_token("TOKENLOOM_TOKEN", {}) is None
    assert find_token("TOKENLOOM_TOKEN", {"TOKENLOOM_TOKEN": CONTROL}) == CONTROL
    assert find_token("TOKENLOOM_TOKEN", {}, file) == CONTROL
    assert find_token("TOKENLOOM_TOKEN", {"TOKENLOOM_TOKEN_FILE": str(file)}) == CONTROL
    with pytest.raises(
        ValueError, match="there are two tokens, one in TOKENLOOM_TOKEN and one in the file"
    ):
        find_token("TOKENLOOM_TOKEN", {"TOKENLOOM_TOKEN": CONTROL}, file)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_token_file_that_others_can_use_is_refused_with_its_mode_and_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    file = tmp_path / "token"
    file.write_text(CONTROL, encoding="utf-8")
    file.chmod(mode)

    with pytest.raises(
        ConfigError, match=rf"has mode 0{mode:o}, .*expected 0600: chmod 600 {file}"
    ):
        Access.find({}, file)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x" * (MIN_CHARACTERS - 1), "x" * (MAX_CHARACTERS + 1)),
        *("with a blank inside", "zwölf-zeichen-und-mehr", "new\nline-and-some-more"),
    ],
)
def test_what_is_no_token_is_refused_and_never_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    for give in (lambda: Access.find({"TOKENLOOM_TOKEN": text}), lambda: Access.find({}, file)):
        with pytest.raises(ConfigError, match="expected a token of 16 to 1024") as caught:
            give()
        assert not text.strip() or text not in str(caught.value)


def test_an_empty_read_token_is_none_and_an_empty_control_token_is_refused() -> None:
    access = Access.find({"TOKENLOOM_TOKEN": CONTROL, "TOKENLOOM_READ_TOKEN": ""})
    assert access.check(f"Bearer {CONTROL}", Scope.CONTROL).scope is Scope.ADMIN
    with pytest.raises(Unauthenticated):
        access.check("Bearer ", Scope.READ)
    with pytest.raises(ConfigError, match="TOKENLOOM_TOKEN holds nothing"):
        Access.find({"TOKENLOOM_TOKEN": "", "TOKENLOOM_READ_TOKEN": ""})


def test_a_token_that_the_server_made_is_the_same_after_a_restart_and_one_that_is_set_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENLOOM_TOKEN", raising=False)
    folder = tmp_path / "index"
    made, again = (ServerAccess(make_token=True).made_token(folder) for _ in range(2))
    assert made is not None
    assert again is not None
    assert (made.is_new, again.is_new) == (True, False)
    assert [path.name for path in folder.iterdir()] == ["token"]
    lines = again.lines("http://0.0.0.0:8080/", "0.0.0.0:50051", RUN)
    token = read_token(again.file)
    assert f"http://127.0.0.1:8080/#token={token}" in lines
    # Also where that is not the folder beside the present one.
    assert f"again by: tokenloom token --index-dir {folder.resolve()}\n" in lines
    assert f'RemoteDataset("grpc://127.0.0.1:50051/{RUN}"' in lines
    assert f'RemoteDataset("grpcs://127.0.0.1:50051/{RUN}"' in again.lines(
        "https://[::]:8080/", "127.0.0.1:50051", RUN
    )
    assert ServerAccess().made_token(folder) is None
    again.file.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644"):
        ServerAccess(make_token=True).access(again)
    monkeypatch.setenv("TOKENLOOM_TOKEN", "")  # as Compose passes one on that is set to nothing
    again.file.chmod(0o600)
    assert ServerAccess(make_token=True).made_token(folder) == again
    assert (
        ServerAccess(make_token=True).access(again).check(f"Bearer {token}", Scope.CONTROL).scope
        is Scope.ADMIN
    )
    monkeypatch.setenv("TOKENLOOM_TOKEN", CONTROL)
    assert ServerAccess(make_token=True).made_token(folder) is None
    assert (
        ServerAccess(make_token=True).access(None).check(f"Bearer {CONTROL}", Scope.CONTROL).scope
        is Scope.ADMIN
    )


def test_a_token_that_cannot_be_kept_or_is_not_there_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENLOOM_TOKEN", raising=False)
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match=r"no token can be kept in '.*/file/below' \(Not a directory\); set TOKENLOOM",
    ):
        make_token(tmp_path / "file" / "below")
    monkeypatch.chdir(tmp_path)
    finished = CliRunner().invoke(app, ["token"])
    assert finished.exit_code == 2
    assert (
        "TOKENLOOM_TOKEN is not set, and '.tokenloom-index/token' does not exist" in finished.output
    )


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=f"the token file '{path}' cannot be read"):
            Access.find({}, path)


def test_a_token_for_reading_needs_another_one_for_control() -> None:
    with pytest.raises(ConfigError, match="set TOKENLOOM_TOKEN or --token-file, too"):
        Access.find({"TOKENLOOM_READ_TOKEN": READ})
    with pytest.raises(ConfigError, match="the same token"):
        Access.find({"TOKENLOOM_READ_TOKEN": READ, "TOKENLOOM_TOKEN": READ})


def test_no_text_of_a_token_is_kept() -> None:
    access = Access(CONTROL, READ)

    assert not re.search("control-token|read-token", repr(vars(access)))


def test_a_token_may_travel_in_the_clear_on_this_machine_and_where_it_is_allowed_by_name() -> None:
    allowed = {"TOKENLOOM_PLAINTEXT_HOSTS": "data0, fd00::1"}
    for host in ("127.0.0.1", "127.8.9.1", "[::1]", "::1", "localhost"):
        assert is_loopback(host)
        refuse_plaintext(host, {}, "remedy")
    for host in ("data0", "DATA0", "[fd00::1]"):
        refuse_plaintext(host, allowed, "remedy")
    for host in (
        "10.0.0.1",
        "data1",
        "0.0.0.0",
        "[::]",
        "localhost.evil.example",
        "",
        "127.0.0.1.evil.example",
    ):
        assert not is_loopback(host)
        with pytest.raises(ValueError, match=r"unencrypted.*: remedy; or"):
            refuse_plaintext(host, allowed, "remedy")


# REST: every route that the app has


APP = create_app(Backend(MemoryService(), "0"), tool_routes())
#: By method and path.
SCOPES = APP.scopes


def test_every_route_has_a_scope_and_no_scope_is_for_a_route_that_is_gone() -> None:
    routes = {
        (method, route.path) for route in APP.routes for method in route.methods if method != "HEAD"
    }
    assert routes == set(SCOPES)


def test_everybody_hears_whether_a_server_is_ready_and_readers_alone_why_not(
    http: httpx.Client, service: MemoryService
) -> None:
    service.reason = "run secret: the ledger is away: Redis at 10.0.0.7:6379 cannot be reached"
    try:
        for token, told in ((None, False), ("f" * 32, False), (READ, True), (CONTROL, True)):
            answer = http.get(
                "/readyz", headers={"authorization": f"Bearer {token}"} if token else {}
            )
            assert answer.status_code == 503
            assert (service.reason in answer.text) == told
            assert ("secret" in answer.text) == told
    finally:
        service.reason = None


def test_only_health_and_the_pages_own_files_are_open() -> None:
    open_to_all = {path for (_, path), scope in SCOPES.items() if scope is Scope.OPEN}
    assert open_to_all == {"/healthz", "/readyz", *(url for url, _, _ in page_files())}
    looking = {
        (method, path)
        for (method, path), scope in SCOPES.items()
        if scope < Scope.CONTROL and method != "GET"
    }
    assert looking == {("POST", "/v1/runs/{run}/plan")}, "changes nothing"


@pytest.fixture(scope="module")
def rest() -> Iterator[tuple[MemoryService, RestServer]]:
    service = MemoryService()
    service.put(run_stats(RUN))
    service.snapshot(RUN, 4096, save=True)
    server = RestServer("127.0.0.1", 0, Access(CONTROL, READ), routes=tool_routes)
    server.start(service)
    yield service, server
    assert server.stop()


@pytest.fixture
def service(rest: tuple[MemoryService, RestServer]) -> MemoryService:
    rest[0].calls = 0
    return rest[0]


@pytest.fixture(scope="module")
def http(rest: tuple[MemoryService, RestServer]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rest[1].url, verify=False, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), sorted(SCOPES))
def test_a_route_answers_who_brings_what_it_asks_for_and_nobody_else(
    http: httpx.Client, service: MemoryService, method: str, path: str
) -> None:
    url = path.format(run=RUN, snapshot_id="s0-4096", index=4095, micro_step=3, number=1)
    url += "?source=code" if path.endswith("/samples") else ""
    bodies = {"POST": b'{"sample_index": 12}', "PATCH": b'{"reason": "because"}'}
    if of_server := {
        "/v1/runs": b'{"file": "/srv/runs/new.yaml"}',
        f"/v1/runs/{RUN}/reload": b"{}",
    }.get(url):
        bodies["POST"] = of_server
    body = {"content": bodies[method]} if method in bodies else {}
    needed = SCOPES[method, path]
    for what, (header, scope) in BROUGHT.items():
        service.revise(RUN, MixtureChange(reason="to be dropped"))
        service.restore(RUN, sample_index=12)
        service.calls = 0
        headers = {"content-type": "application/json"} | (
            {"authorization": header} if header is not None else {}
        )
        answer = http.request(method, url, headers=headers, **body)
        if scope >= needed:
            assert answer.status_code in (200, 201), (what, answer.text)
            continue
        # A reader is told that it is not enough; a stranger only that a token is wanted.
        status, name = (403, "Forbidden") if scope is Scope.READ else (401, "Unauthenticated")
        assert (answer.status_code, answer.json()["error"]) == (status, name), what
        assert answer.headers["www-authenticate"].startswith('Bearer realm="tokenloom"')
        assert (f'scope="{needed.name.lower()}"' in answer.headers["www-authenticate"]) is (
            status == 403
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert service.calls == 0, f"{what}: the service was asked"


def test_what_does_not_exist_is_not_told_to_strangers(http: httpx.Client) -> None:
    for method, path in (
        ("GET", "/nowhere"),
        ("DELETE", "/v1/runs"),
        ("POST", "/healthz"),
        ("OPTIONS", "/v1/runs"),
    ):
        assert http.request(method, path).status_code == 401, path
        known = {"authorization": f"Bearer {READ}", "content-type": "application/json"}
        assert http.request(method, path, headers=known).status_code in (404, 405), path


def test_two_tokens_are_none(http: httpx.Client) -> None:
    both = [("authorization", f"Bearer {token}") for token in (READ, CONTROL)]

    assert http.get("/v1/runs", headers=both).status_code == 401


def test_a_token_in_the_address_opens_nothing(http: httpx.Client) -> None:
    for name in ("token", "access_token", "authorization"):
        assert http.get("/v1/runs", params={name: CONTROL}).status_code == 401


def test_the_body_of_a_stranger_is_not_waited_for(rest: tuple[MemoryService, RestServer]) -> None:
    host, _, port = rest[1].address.rpartition(":")
    head = f"POST /v1/runs/{RUN}/restore HTTP/1.1\r\nHost: x\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 900\r\n"
    with socket.create_connection((host, int(port)), timeout=8) as connection:
        connection.sendall(head.encode() + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_where_a_token_is_asked_for_the_server_answers_to_any_of_its_names(
    http: httpx.Client,
) -> None:
    headers = {"host": "loom.example:8080", "authorization": f"Bearer {READ}"}

    assert http.get("/v1/runs", headers=headers).status_code == 200
    assert (
        http.get("/v1/runs", headers=headers | {"origin": "https://evil.example"}).status_code
        == 403
    )
    assert http.get("/v1/runs", headers={"host": "loom.example"}).status_code == 401


# gRPC: every method of every service that the server has

#: The least scope of each RPC, by its path.
RPCS = {path: rpc.scope for path, rpc in endpoint.rpcs().items()}


def rpcs() -> list[str]:
    services = (
        wire.DESCRIPTOR.services_by_name["DataLoader"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
    return [
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    ]


def test_every_rpc_has_a_scope_and_no_scope_is_for_an_rpc_that_is_gone() -> None:
    assert set(rpcs()) == set(RPCS)


def test_only_health_is_open_and_what_trains_or_changes_something_takes_control() -> None:
    names = {
        scope: {method.rpartition("/")[2] for method, s in RPCS.items() if s is scope}
        for scope in Scope
    }

    assert names[Scope.OPEN] == {"Check"}
    # And what BY_REQUEST has.
    assert names[Scope.TRAIN] == {"Report"}
    assert names[Scope.CONTROL] == {"Restore"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        runs_of(tmp_path_factory.mktemp("ledger")) as runs,
        over_grpc(runs, Access(CONTROL, READ)) as address,
    ):
        yield address


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as opened:
        yield opened


#: Requests that ask for more than their method does at least, and that ask for no more.
BY_REQUEST = {
    "/tokenloom.v2.DataLoader/Join": (
        wire.JoinRequest(run=RUN, world_size=1, batch_size=1, attempt="a", nonce="n"),
        wire.JoinRequest(run=RUN, world_size=1, batch_size=1, peek=True),
    ),
    "/tokenloom.v2.DataLoader/Stream": (
        wire.StreamRequest(open=wire.StreamOpen(run=RUN, nonce="n")),
        wire.StreamRequest(open=wire.StreamOpen(run=RUN, peek=True)),
    ),
    "/tokenloom.v2.DataLoader/Snapshot": (
        wire.SnapshotRequest(run=RUN, save=True),
        wire.SnapshotRequest(run=RUN),
    ),
}


def metadata_of(header: str | None) -> tuple[tuple[str, str], ...]:
    return () if header is None else (("authorization", header),)


def outcome(
    channel: grpc.Channel, method: str, header: str | None, *messages: bytes, ends: bool = True
) -> tuple[grpc.StatusCode, str]:
    """(status, name of the error) of a call with these messages, as bytes, whatever kind of method it is. Only the
    first answer is waited for."""
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from messages
        if not ends:
            over.wait(120)

    call = channel.stream_stream(method)(requests(), metadata=metadata_of(header), timeout=120)
    try:
        next(call)
        return grpc.StatusCode.OK, ""
    except StopIteration:
        return grpc.StatusCode.OK, ""
    except grpc.RpcError as error:
        return error.code(), dict(error.trailing_metadata() or ()).get("tokenloom-error", "")
    finally:
        over.set()
        call.cancel()


@pytest.mark.parametrize("method", rpcs())
def test_an_rpc_is_there_for_who_brings_what_it_asks_for_and_for_nobody_else(
    channel: grpc.Channel, method: str
) -> None:
    looks = BY_REQUEST[method][1].SerializeToString() if method in BY_REQUEST else b""
    for what, (header, scope) in BROUGHT.items():
        found = outcome(channel, method, header, looks)
        if scope >= RPCS[method]:
            # Let in: an empty request is wrong in its own way, or is not.
            assert found[0] not in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.PERMISSION_DENIED,
            ), (what, found)
            assert found[0] is not grpc.StatusCode.UNIMPLEMENTED, (what, found)
        elif scope is Scope.READ:
            assert found == (grpc.StatusCode.PERMISSION_DENIED, "Forbidden"), what
        else:
            assert found == (grpc.StatusCode.UNAUTHENTICATED, "Unauthenticated"), what


@pytest.mark.parametrize(
    "method", [method for method, scope in RPCS.items() if scope is not Scope.OPEN]
)
def test_a_stranger_is_refused_before_a_message_is_read(channel: grpc.Channel, method: str) -> None:
    # Nothing is sent, and the request does not end: an answer can only come from the header alone.
    assert outcome(channel, method, None, ends=False) == (
        grpc.StatusCode.UNAUTHENTICATED,
        "Unauthenticated",
    )


@pytest.mark.parametrize(("name", "most"), [("Stats", READ_CALLS), ("Stream", PEEK_CALLS)])
def test_who_only_looks_takes_no_place_of_the_trainers_and_health_has_places_of_its_own(
    channel: grpc.Channel, name: str, most: int
) -> None:
    over = threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait(120)
        yield from ()

    health = "/grpc.health.v1.Health/Check"
    assert (
        outcome(channel, health, None, b"")[0] is grpc.StatusCode.OK
    )  # connected, so that calls come in their order
    # As many calls as there are places for them; each waits for a request that does not come.
    call_it = channel.stream_stream(f"/tokenloom.v2.DataLoader/{name}")
    waiting = [
        call_it(silent(), metadata=metadata_of(f"Bearer {READ}"), timeout=120) for _ in range(most)
    ]
    try:
        further = call_it(iter([b"\xff"]), metadata=metadata_of(f"Bearer {READ}"), timeout=120)
        join = outcome(channel, "/tokenloom.v2.DataLoader/Join", f"Bearer {CONTROL}", b"")
        assert join == (grpc.StatusCode.NOT_FOUND, "NotFound")
        assert outcome(channel, health, None, b"")[0] is grpc.StatusCode.OK
        assert (
            outcome(channel, "/tokenloom.v2.DataLoader/Stats", None, b"")[0]
            is grpc.StatusCode.UNAUTHENTICATED
        )
        assert not further.done(), "nothing of it is read"
        waiting.pop().cancel()
        assert further.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        over.set()
        for call in waiting:
            call.cancel()


def test_a_method_that_nobody_has_is_only_told_to_who_may_do_everything(
    channel: grpc.Channel,
) -> None:
    method = "/tokenloom.v2.DataLoader/Nothing"

    assert outcome(channel, method, None)[0] is grpc.StatusCode.UNAUTHENTICATED
    assert outcome(channel, method, f"Bearer {READ}")[0] is grpc.StatusCode.PERMISSION_DENIED
    assert outcome(channel, method, f"Bearer {CONTROL}")[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_client_of_another_version_is_refused_with_both_versions(
    channel: grpc.Channel, version: int
) -> None:
    method = f"/tokenloom.v{version}.DataLoader/Join"
    refused = (grpc.StatusCode.FAILED_PRECONDITION, "ProtocolError")
    assert wire.DESCRIPTOR.package == f"tokenloom.v{VERSION}"

    assert outcome(channel, method, None)[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (
        outcome(channel, method, f"Bearer {READ}")
        == outcome(channel, method, f"Bearer {CONTROL}")
        == refused
    )
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"", metadata=metadata_of(f"Bearer {READ}"), timeout=120)
    words = f"speaks version {version} of Tokenloom's wire protocol, and this server version"
    words += f" {VERSION}: install the same"
    assert words in (caught.value.details() or "")


@pytest.mark.parametrize("method", BY_REQUEST)
def test_what_changes_something_needs_control_where_the_method_alone_does_not(
    channel: grpc.Channel, method: str
) -> None:
    changes, looks = (request.SerializeToString() for request in BY_REQUEST[method])
    absent = (grpc.StatusCode.NOT_FOUND, "NotFound")

    assert outcome(channel, method, f"Bearer {READ}", changes) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "Forbidden",
    )
    assert outcome(channel, method, f"Bearer {READ}", looks) == absent
    assert outcome(channel, method, f"Bearer {CONTROL}", changes) == absent


def test_two_tokens_in_the_metadata_are_none(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/tokenloom.v2.DataLoader/Stats")
    with pytest.raises(grpc.RpcError) as caught:
        call(
            b"",
            metadata=metadata_of(f"Bearer {READ}") + metadata_of(f"Bearer {CONTROL}"),
            timeout=120,
        )

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "header", [f"Bearer {CONTROL}", f"Bearer {READ}", f"Bearer {CONTROL[:-1]}!", "Bearer x"]
)
def test_a_token_is_compared_as_a_digest_in_constant_time_and_with_both(
    monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((len(given), len(known)))
        return hmac.compare_digest(given, known)

    monkeypatch.setattr("tokenloom_server.api.auth.hmac", SimpleNamespace(compare_digest=compare))
    with contextlib.suppress(Unauthenticated, Forbidden):
        Access(CONTROL, READ).check(header, Scope.CONTROL)

    assert compared == [(32, 32), (32, 32)]


# Bounds


#: What each method takes at most, in bytes.
MOST = {
    "Join": MAX_REQUEST_BYTES,
    "Stream": SMALL_REQUEST_BYTES,
    "Snapshot": SMALL_REQUEST_BYTES,
    "Restore": MAX_REQUEST_BYTES,
    "Stats": SMALL_REQUEST_BYTES,
    "Plan": SMALL_REQUEST_BYTES,
    "Tokenizer": SMALL_REQUEST_BYTES,
    "Report": MAX_REPORT_BYTES,
}


def test_every_method_has_a_bound_on_what_it_takes() -> None:
    assert {
        method.name for method in wire.DESCRIPTOR.services_by_name["DataLoader"].methods
    } == set(MOST)


def padded(size: int) -> bytes:
    """A message of a field that no method knows, of exactly this many bytes."""
    key, length = b"\xfa\x7f", size - 6  # field 2047, length-delimited
    head = key + bytes(
        (length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14 & 0x7F | 0x80, length >> 21)
    )
    return head + bytes(length)


@pytest.mark.parametrize("name", MOST)
def test_a_message_of_more_than_its_method_takes_is_refused(
    channel: grpc.Channel, name: str
) -> None:
    method, header, most = f"/tokenloom.v2.DataLoader/{name}", f"Bearer {CONTROL}", MOST[name]
    assert len(padded(most)) == most

    fits = outcome(channel, method, header, padded(most))
    # None names a run; without one, Stats is of the server.
    expected = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
    assert fits[0] in ((grpc.StatusCode.OK,) if name == "Stats" else expected), fits
    over = outcome(channel, method, header, padded(most + 1))
    # Above the greatest of all, gRPC itself refuses, by the length that is announced.
    named = "" if most == MAX_REQUEST_BYTES else "LimitExceeded"
    assert over == (grpc.StatusCode.RESOURCE_EXHAUSTED, named)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """A server's runs, none yet."""
    with runs_of(tmp_path) as made:
        yield made


def mixture_of(folder: Path, run: str) -> Path:
    write_txt(folder / "rows.txt", [f"row {number}" for number in range(50)])
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(flat(["txt:rows.txt:text"], run=run)), encoding="utf-8")
    return path


def test_a_server_has_so_many_runs_and_the_next_is_refused_before_it_is_recorded(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.api.service.MAX_RUNS", 2)
    for run in ("one", "two"):
        runs.add(mixture_of(tmp_path, run), None)

    with pytest.raises(
        LimitExceeded, match="this server has 2 runs, and one serves at most 2; start another"
    ):
        runs.add(mixture_of(tmp_path, "three"), None)
    assert runs.names() == ["one", "two"]


def test_a_run_has_so_many_saved_snapshots_and_the_next_is_not_saved(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.run.snapshots.MAX_SAVED_SNAPSHOTS", 1)
    runs.add(mixture_of(tmp_path, "saving"), None)
    text, saved = runs.get("saving").snapshots.take(None, save=True)
    assert saved is not None

    with pytest.raises(
        LimitExceeded, match="'saving' has 1 saved snapshots, and the ledger keeps at most 1"
    ):
        runs.get("saving").snapshots.take(None, save=True)
    assert [entry.id for entry in runs.get("saving").snapshots.list()] == [saved]
    assert runs.get("saving").snapshots.take(None, save=False) == (text, None)


def test_a_world_that_has_no_place_is_refused_before_there_is_a_slot_for_it() -> None:
    largest = JoinCall(
        rank=0,
        world_size=join_call.MAX_WORLD_SIZE + 1,
        batch_size=1,
        attempt="a",
        nonce="n",
        resume="",
        state=b"",
    )
    with pytest.raises(JoinRefused, match=r"world size is 4097; expected 1 to 4096"):
        join_call.check(largest, sample_bytes=1)
    join_call.check(replace(largest, world_size=join_call.MAX_WORLD_SIZE), sample_bytes=1)


def test_a_snapshot_that_is_too_large_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tokenloom_server.order.snapshot.unseal", lambda text: pytest.fail("it was parsed")
    )
    config = parsed(flat(["txt:a.txt:text"]))
    with pytest.raises(
        SnapshotInvalid, match=f"has {snapshot.MAX_BYTES + 1} bytes; expected at most"
    ):
        snapshot.parse(
            b"x" * (snapshot.MAX_BYTES + 1),
            {},
            lambda _: pytest.fail("it was parsed"),
            config,
        )


def test_the_bounds_fit_together() -> None:
    assert MAX_REQUEST_BYTES > snapshot.MAX_BYTES, "a Join carries a snapshot"
    assert MAX_CALLS > 2 * join_call.MAX_WORLD_SIZE, (
        "a whole world reconnects, and somebody looks on"
    )


def test_a_call_beyond_the_places_is_refused_at_once(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.api.grpc.server.MAX_CALLS", 2)
    # A busy machine may take longer than a stream has for its first message, and its place would be free.
    monkeypatch.setattr("tokenloom_server.api.grpc.endpoint.OPEN_TIMEOUT_S", 600.0)
    with over_grpc(runs) as address, grpc.insecure_channel(address) as channel:
        over = threading.Event()

        def silent() -> Iterator[bytes]:
            over.wait(120)
            yield from ()

        open_stream = channel.stream_stream("/tokenloom.v2.DataLoader/Stream")
        calls = [open_stream(silent(), timeout=120) for _ in range(5)]
        try:
            wait_for(lambda: sum(call.done() for call in calls) >= 3, "three refusals")
            refused = [call.code() for call in calls if call.done()]
            assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
            found = outcome(channel, "/tokenloom.v2.DataLoader/Stats", None, b"")
            assert found == (grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        finally:
            over.set()
            for call in calls:
                call.cancel()

"""What a client shows a server, and where it refuses to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenloom import ConnectionOptions, Forbidden, RemoteDataset, Unauthenticated
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.credentials import Credentials, TlsFiles, read_secret

TOKEN = "a-token-0123456789"


def find(*hosts: str, tls: bool = False, environment: dict[str, str] | None = None, **given: Any) -> Credentials:
    return Credentials.find(hosts or ("127.0.0.1",), tls=tls, environment=environment or {}, **given)


def test_a_token_is_the_one_given_or_the_environments() -> None:
    environment = {"TOKENLOOM_TOKEN": "the-environments-token"}

    assert find().token is None
    assert find(environment=environment).token == "the-environments-token"
    assert find(environment=environment, token=TOKEN).token == TOKEN
    assert find(token=TOKEN).metadata == (("authorization", f"Bearer {TOKEN}"),)
    assert find().metadata == ()


def test_what_is_no_token_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="token holds 5 characters; expected a token of 16") as caught:
        find(token="short")

    assert "short" not in str(caught.value)


def test_nothing_secret_is_in_a_repr(tmp_path: Path) -> None:
    (tmp_path / "pem").touch(0o600)
    (tmp_path / "pem").write_bytes(b"-----SECRET-----")
    found = find(tls=True, token=TOKEN, files=TlsFiles(*[tmp_path / "pem"] * 3))

    assert TOKEN not in repr(found)
    assert "SECRET" not in repr(found)


@pytest.mark.parametrize("hosts", [("10.0.0.1",), ("127.0.0.1", "data0"), ("[fd00::1]",), ("data0.example.com",)])
def test_a_token_does_not_travel_in_the_clear_to_another_machine(hosts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=rf"would travel to {hosts[-1].replace('[', '.')[:4]}.* unencrypted"):
        find(*hosts, token=TOKEN)
    named = {"TOKENLOOM_PLAINTEXT_HOSTS": ",".join(host.strip("[]") for host in hosts)}
    assert find(*hosts, token=TOKEN, environment=named).token == TOKEN
    assert find(*hosts, token=TOKEN, tls=True).token == TOKEN
    assert find(*hosts).token is None


def test_a_dataset_refuses_before_it_contacts_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"write grpcs:// .* or, .*TOKENLOOM_PLAINTEXT_HOSTS=192\.0\.2\.1"):
        RemoteDataset(
            "grpc://192.0.2.1:50051/run",
            1,
            rank=0,
            world_size=1,
            attempt="a",
            connection=ConnectionOptions(token=TOKEN),
        )
    monkeypatch.setenv("TOKENLOOM_TOKEN", TOKEN)
    with pytest.raises(ValueError, match="unencrypted"):
        RemoteDataset("grpc://192.0.2.1:50051/run", 1, rank=0, world_size=1, attempt="a")
    # One of several is enough.
    with pytest.raises(ValueError, match=r"would travel to 192\.0\.2\.1 unencrypted"):
        RemoteDataset("grpc://127.0.0.1:50051,192.0.2.1:50051/run", 1, rank=0, world_size=1, attempt="a")
    RemoteDataset("grpcs://127.0.0.1:50051,192.0.2.1:50051/run", 1, rank=0, world_size=1, attempt="a")


def test_files_of_tls_are_those_given_or_the_environments(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key", "other"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(name, encoding="utf-8")
    environment = {f"TOKENLOOM_TLS_{name.upper()}": str(tmp_path / name) for name in ("ca", "cert", "key")}

    found = find(tls=True, environment=environment, files=TlsFiles(ca=tmp_path / "other"))

    assert (found.ca, found.certificate, found.key) == (b"other", b"cert", b"key")
    # Set for other servers; this one is asked without TLS.
    assert find(environment=environment) == Credentials()


def test_files_of_tls_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "cert").touch()
    with pytest.raises(ValueError, match=r"tls_cert .* and tls_key .* belong together"):
        find(tls=True, files=TlsFiles(cert=tmp_path / "cert"))
    with pytest.raises(ValueError, match="TOKENLOOM_TLS_CA: '/no/such/file' cannot be read"):
        find(tls=True, environment={"TOKENLOOM_TLS_CA": "/no/such/file"})
    with pytest.raises(ValueError, match=r"tls_ca: '.?' cannot be read"):
        find(tls=True, files=TlsFiles(ca=""))
    with pytest.raises(ValueError, match="for grpcs://, but the address begins with grpc://"):
        find(files=TlsFiles(ca=tmp_path / "cert"))


@pytest.fixture
def refusing() -> Iterator[Callable[[str, grpc.StatusCode], tuple[str, list[str]]]]:
    """Starts a server that refuses every call with an error; gives a run's URL, and the methods that were called."""
    servers: list[grpc.Server] = []

    def start(name: str, status: grpc.StatusCode) -> tuple[str, list[str]]:
        calls: list[str] = []

        class Refuse(grpc.GenericRpcHandler):
            def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
                calls.append(details.method)

                def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
                    context.set_trailing_metadata((("tokenloom-error", name),))
                    context.abort(status, "no entry")
                    raise AssertionError

                return grpc.unary_unary_rpc_method_handler(refuse)

        server = grpc.server(futures.ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((Refuse(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"grpc://127.0.0.1:{port}/run", calls

    yield start
    for server in servers:
        server.stop(0).wait(5)


@pytest.mark.parametrize(
    ("error", "status"),
    [(Unauthenticated, grpc.StatusCode.UNAUTHENTICATED), (Forbidden, grpc.StatusCode.PERMISSION_DENIED)],
)
def test_a_refusal_at_the_entry_is_final(refusing: Any, error: type[Exception], status: grpc.StatusCode) -> None:
    url, calls = refusing(error.__name__, status)
    began = time.monotonic()
    with (
        RemoteDataset(
            url, 1, rank=0, world_size=1, attempt="a", connection=ConnectionOptions(connect_timeout_s=300)
        ) as dataset,
        pytest.raises(error, match="no entry"),
    ):
        next(iter(dataset))

    assert calls == [f"/{wire.DESCRIPTOR.services_by_name['DataLoader'].full_name}/Join"]
    assert time.monotonic() - began < 120


@pytest.mark.parametrize(("mode", "owner", "is_read"), [(0o640, 0, True), (0o644, 0, False), (0o640, 1000, False)])
def test_a_key_that_is_roots_may_be_read_by_the_group_of_a_server_that_is_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, is_read: bool
) -> None:
    """As Kubernetes mounts a Secret."""
    file = tmp_path / "tls.key"
    file.write_bytes(b"key")
    file.chmod(mode)
    status = file.stat()
    theirs = os.stat_result([*status[:4], owner, *status[5:]])
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    monkeypatch.setattr(os, "fstat", lambda descriptor: theirs)
    if is_read:
        assert read_secret("the key", file) == b"key"
    else:
        with pytest.raises(ValueError, match=f"the key has mode 0{mode:o}"):
            read_secret("the key", file)

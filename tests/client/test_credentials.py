"""What a client shows a server, and where it refuses to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_server import Script, serving
from tokenloom import ConnectionOptions, Forbidden, LaunchOptions, RemoteDataset, Unauthenticated
from tokenloom_proto.credentials import Credentials, TlsFiles, read_secret

TOKEN = "a-token-0123456789"


def find(
    *hosts: str, tls: bool = False, environment: dict[str, str] | None = None, **given: Any
) -> Credentials:
    return Credentials.find(
        hosts or ("127.0.0.1",), tls=tls, environment=environment or {}, **given
    )


def test_a_token_is_the_one_given_or_the_environments() -> None:
    environment = {"TOKENLOOM_TOKEN": "the-environments-token"}

    assert find().token is None
    assert find(environment=environment).token == "the-environments-token"
    assert find(environment=environment, token=TOKEN).token == TOKEN
    assert find(token=TOKEN).metadata == (("authorization", f"Bearer {TOKEN}"),)
    assert find().metadata == ()


def test_what_is_no_token_is_refused_without_showing_it() -> None:
    with pytest.raises(
        ValueError, match="token holds 5 characters; expected a token of 16"
    ) as caught:
        find(token="short")

    assert "short" not in str(caught.value)


def test_nothing_secret_is_in_a_repr(tmp_path: Path) -> None:
    (tmp_path / "pem").touch(0o600)
    (tmp_path / "pem").write_bytes(b"-----SECRET-----")
    found = find(tls=True, token=TOKEN, files=TlsFiles(*[tmp_path / "pem"] * 3))

    assert TOKEN not in repr(found)
    assert "SECRET" not in repr(found)


@pytest.mark.parametrize(
    "hosts", [("10.0.0.1",), ("127.0.0.1", "data0"), ("[fd00::1]",), ("data0.example.com",)]
)
def test_a_token_does_not_travel_in_the_clear_to_another_machine(hosts: tuple[str, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"would travel to {hosts[-1].replace('[', '.')[:4]}.* unencrypted"
    ):
        find(*hosts, token=TOKEN)
    named = {"TOKENLOOM_PLAINTEXT_HOSTS": ",".join(host.strip("[]") for host in hosts)}
    assert find(*hosts, token=TOKEN, environment=named).token == TOKEN
    assert find(*hosts, token=TOKEN, tls=True).token == TOKEN
    assert find(*hosts).token is None


def test_a_dataset_refuses_before_it_contacts_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"write grpcs:// .* or, .*TOKENLOOM_PLAINTEXT_HOSTS=192\.0\.2\.1"
    ):
        RemoteDataset(
            "grpc://192.0.2.1:50051/run",
            1,
            rank=0,
            world_size=1,
            launch=LaunchOptions(attempt="a"),
            connection=ConnectionOptions(token=TOKEN),
        )
    monkeypatch.setenv("TOKENLOOM_TOKEN", TOKEN)
    with pytest.raises(ValueError, match="unencrypted"):
        RemoteDataset(
            "grpc://192.0.2.1:50051/run", 1, rank=0, world_size=1, launch=LaunchOptions(attempt="a")
        )
    # One of several is enough.
    with pytest.raises(ValueError, match=r"would travel to 192\.0\.2\.1 unencrypted"):
        RemoteDataset(
            "grpc://127.0.0.1:50051,192.0.2.1:50051/run",
            1,
            rank=0,
            world_size=1,
            launch=LaunchOptions(attempt="a"),
        )
    RemoteDataset(
        "grpcs://127.0.0.1:50051,192.0.2.1:50051/run",
        1,
        rank=0,
        world_size=1,
        launch=LaunchOptions(attempt="a"),
    )


def test_files_of_tls_are_those_given_or_the_environments(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key", "other"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(name, encoding="utf-8")
    environment = {
        f"TOKENLOOM_TLS_{name.upper()}": str(tmp_path / name) for name in ("ca", "cert", "key")
    }

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


@pytest.mark.parametrize("error", [Unauthenticated, Forbidden])
def test_a_refusal_at_the_entry_is_final(error: type[Exception]) -> None:
    with (
        serving(Script(join_errors=[error.__name__])) as (server, url, _),
        RemoteDataset(url, 1) as dataset,
    ):
        with pytest.raises(error, match="as the script says"):
            next(iter(dataset))

        assert len(server.joins) == 1


@pytest.mark.parametrize(
    ("mode", "owner", "is_read"), [(0o640, 0, True), (0o644, 0, False), (0o640, 1000, False)]
)
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

"""The way in, with real processes: tokens, TLS, and what may be reached from elsewhere."""

from __future__ import annotations

import itertools
import json
import re
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis
import trustme
from conftest import Corpus, StartServer
from cryptography.hazmat.primitives import serialization
from support.redirecting import Redirecting
from support.redis_server import RedisServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import World, with_connection
from tokenloom import (
    ConnectionOptions,
    Forbidden,
    PeekDataset,
    RemoteDataset,
    ServerUnavailable,
    Unauthenticated,
)
from tokenloom_server.api.tls import Tls
from tokenloom_server.errors import ConfigError

RUN = "entry"
CONTROL, READ = "control-token-0123456789", "read-token-0123456789abc"
TOKENS = {"TOKENLOOM_TOKEN": CONTROL, "TOKENLOOM_READ_TOKEN": READ}


@pytest.fixture
def mixture(corpus: Corpus) -> Path:
    return corpus.mixture(RUN)


def dataset(url: str, **options: Any) -> RemoteDataset:
    return RemoteDataset(url, 1, **{"rank": 0, "world_size": 1} | with_connection(options))


def token_file(folder: Path, token: str) -> Path:
    file = folder / "token"
    file.unlink(missing_ok=True)
    file.write_text(token, encoding="utf-8")
    file.chmod(0o600)
    return file


# Tokens


def test_a_trainer_brings_the_token_and_who_only_looks_needs_no_more_than_the_one_for_reading(
    mixture: Path, start_server: StartServer, tokenloom: CommandLine, tmp_path: Path
) -> None:
    flags = ("--token-file", token_file(tmp_path, CONTROL))
    server = start_server(mixture, flags=flags, environment={"TOKENLOOM_READ_TOKEN": READ})
    url = server.url(RUN)
    connection = ConnectionOptions(token=READ, connect_timeout_s=20.0)
    with World(url, world_size=2, batch_size=2, token=CONTROL) as world:
        with PeekDataset(url, 1, at="fresh", connection=connection) as peek:
            batches = [batch["input_ids"].tolist() for batch in itertools.islice(peek, 8)]
        world.steps(2)
        assert batches == [[list(sample.ids)] for sample in world.receipt.sequence()]
    for error, options in (
        (Unauthenticated, {"attempt": "b"}),
        (Unauthenticated, {"attempt": "c", "token": "another-token-0123456789"}),
        (Forbidden, {"attempt": "d", "token": READ}),
    ):
        with dataset(url, **options) as refused, pytest.raises(error):
            next(iter(refused))

    (tmp_path / "reader").mkdir()
    file = token_file(tmp_path / "reader", READ)
    shown = tokenloom("peek", url, "--token-file", file, "--samples", 2, "--json", "--at", 0)
    assert [json.loads(line)["ids"] for line in shown.output.splitlines()] == [
        ids for (ids,) in batches[:2]
    ]
    figures = tokenloom("stats", server.rest_url, "--token-file", file)
    assert (figures.status, RUN in figures.output) == (0, True), figures.output
    elsewhere = "would travel to 192.0.2.1 unencrypted"
    for arguments, said in (
        (("peek", url), "Unauthenticated: "),
        (("stats", server.rest_url), "Unauthenticated: "),
        (("peek", "grpc://127.0.0.1:1,192.0.2.1:1/run", "--token-file", file), elsewhere),
        (("stats", "http://192.0.2.1:8080", "--token-file", file), elsewhere),
    ):
        done = tokenloom(*arguments)
        assert (done.status, said in " ".join(done.output.split())) == (2, True), done.output
    file.chmod(0o644)
    loose = tokenloom("stats", server.rest_url, "--token-file", file)
    assert (loose.status, "has mode 0644" in " ".join(loose.output.split())) == (2, True), (
        loose.output
    )


def test_a_token_is_not_sent_on_to_where_a_server_redirects(
    tmp_path: Path, tokenloom: CommandLine
) -> None:
    file = token_file(tmp_path, READ)
    with Redirecting() as site:
        tokenloom("stats", site.url, "--token-file", file)
        heard = site.heard
    assert [path for path, _ in heard] == ["/v1/runs", "/elsewhere"]
    assert [authorization for _, authorization in heard] == [f"Bearer {READ}", None]


# Who listens where


def test_without_a_token_only_this_machine_is_listened_to(
    mixture: Path, tokenloom: CommandLine
) -> None:
    for option, other, host in (
        ("--grpc", "--rest", "0.0.0.0"),
        ("--rest", "--grpc", "[::]"),
        ("--rest", "--grpc", "a-name-of-this-machine"),
    ):
        done = tokenloom("serve", mixture, option, f"{host}:0", other, "127.0.0.1:0")

        assert done.status == 2
        message = " ".join(done.output.split())
        assert message.startswith(
            f"ConfigError: {option} {host}:0: others than this machine reach this address"
        )
        assert "set TOKENLOOM_TOKEN" in message
        assert "--token-file" in message


def test_with_a_token_everybody_is_listened_to_and_told_that_it_is_in_the_clear(
    mixture: Path, tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "server", mixture, environment=TOKENS)
    server.grpc, server.rest = "0.0.0.0:0", "0.0.0.0:0"
    server.start()
    try:
        port = server.grpc.rpartition(":")[2]
        with World(f"grpc://127.0.0.1:{port}/{RUN}", token=CONTROL) as world:
            world.steps(1)
        assert (
            httpx.get(f"http://{server.rest}/v1/runs", trust_env=False, timeout=120).status_code
            == 401
        )
        assert server.log.count("without TLS the token and the data travel unencrypted") == 2
    finally:
        server.terminate()


# TLS


class Authority:
    """A CA, and files of certificates that it signed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, *names: str, not_after: datetime | None = None) -> tuple[Path, Path]:
        """(certificate, key) for these names."""
        issued = self._ca.issue_cert(
            *names, not_before=datetime(2020, 1, 1, tzinfo=UTC), not_after=not_after
        )
        cert, key = self._folder / f"{names[0]}.pem", self._folder / f"{names[0]}.key"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        return cert, key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def tls_arguments(cert: Path, key: Path) -> list[str]:
    return ["--tls-cert", str(cert), "--tls-key", str(key)]


def secure(server: ServerProcess) -> str:
    return server.url(RUN).replace("grpc://", "grpcs://")


def status_over_tls(
    server: ServerProcess, context: ssl.SSLContext, path: str, token: str | None = None
) -> int:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.get(
        f"https://{server.rest}{path}",
        verify=context,
        trust_env=False,
        timeout=120,
        headers=headers,
    ).status_code


def test_with_tls_trainers_and_readers_check_the_certificate(
    mixture: Path,
    start_server: StartServer,
    authority: Authority,
    tokenloom: CommandLine,
    tmp_path: Path,
) -> None:
    cert, key = authority.issue("127.0.0.1", "localhost")
    server = start_server(mixture, flags=tls_arguments(cert, key), environment=TOKENS)

    with World(secure(server), world_size=2, token=CONTROL, tls_ca=authority.file) as world:
        world.steps(3)
    # Another CA, none at all, and no TLS: nobody gets through, and no token leaves.
    stranger = Authority(tmp_path / "stranger")
    for url, options in (
        (secure(server), {"tls_ca": stranger.file}),
        (secure(server), {}),
        (server.url(RUN), {}),
    ):
        failing = dataset(url, token=CONTROL, attempt="x", connect_timeout_s=2.0, **options)
        with failing, pytest.raises(ServerUnavailable):
            next(iter(failing))
    mixed_up = dataset(
        f"grpcs://{server.rest}/{RUN}", token=CONTROL, attempt="x", tls_ca=authority.file
    )
    with mixed_up, pytest.raises(ServerUnavailable, match="does not speak gRPC"):
        next(iter(mixed_up))

    context = ssl.create_default_context(cafile=str(authority.file))
    assert status_over_tls(server, context, "/readyz") == 200
    assert status_over_tls(server, context, "/v1/runs") == 401
    assert status_over_tls(server, context, "/v1/runs", READ) == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{server.rest}/readyz", trust_env=False, timeout=120)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        status_over_tls(server, ssl.create_default_context(), "/readyz")

    file = token_file(tmp_path, READ)
    url = f"https://{server.rest}"
    assert f"https://{server.rest}/" in server.log
    trusting = {"TOKENLOOM_TLS_CA": str(authority.file)}
    shown = tokenloom("stats", url, "--token-file", file, environment=trusting)
    assert (shown.status, RUN in shown.output) == (0, True), shown.output
    peeked = tokenloom("peek", secure(server), "--token-file", file, "--json", environment=trusting)
    assert (peeked.status, len(peeked.output.splitlines())) == (0, 8), peeked.output
    distrusting = tokenloom("stats", url, "--token-file", file)
    assert (distrusting.status, "CERTIFICATE_VERIFY_FAILED" in distrusting.output) == (2, True), (
        distrusting.output
    )


def test_with_a_client_ca_only_who_shows_a_certificate_of_it_gets_through(
    mixture: Path,
    start_server: StartServer,
    authority: Authority,
    tokenloom: CommandLine,
    tmp_path: Path,
) -> None:
    clients = Authority(tmp_path / "clients")
    cert, key = clients.issue("trainer")
    server = start_server(
        mixture,
        flags=tls_arguments(*authority.issue("127.0.0.1")),
        environment=TOKENS | {"TOKENLOOM_SERVE_TLS_CLIENT_CA": str(clients.file)},
    )
    known = {"tls_ca": authority.file, "tls_cert": cert, "tls_key": key}

    with World(secure(server), token=CONTROL, **known) as world:
        world.steps(2)
    # A certificate is no token.
    with dataset(secure(server), attempt="y", **known) as refused, pytest.raises(Unauthenticated):
        next(iter(refused))
    # A token is no certificate, and neither is one of another CA.
    other_cert, other_key = authority.issue("trainer")
    for options in ({}, {"tls_cert": other_cert, "tls_key": other_key}):
        options = {"tls_ca": authority.file, "token": CONTROL, "connect_timeout_s": 2.0, **options}
        with (
            dataset(secure(server), attempt="z", **options) as refused,
            pytest.raises(ServerUnavailable),
        ):
            next(iter(refused))

    context = ssl.create_default_context(cafile=str(authority.file))
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        status_over_tls(server, context, "/readyz")
    context.load_cert_chain(cert, key)
    assert status_over_tls(server, context, "/readyz") == 200
    shown = tokenloom(
        "stats",
        f"https://{server.rest}",
        environment={f"TOKENLOOM_{name.upper()}": str(file) for name, file in known.items()},
    )
    assert shown.output.startswith("Unauthenticated: "), shown.output


def test_files_that_are_no_certificate_are_refused_before_anything_listens(
    mixture: Path, authority: Authority, tokenloom: CommandLine, tmp_path: Path
) -> None:
    cert, key = authority.issue("127.0.0.1")
    _, other_key = authority.issue("localhost")
    expired = authority.issue("localhost.expired", not_after=datetime(2024, 5, 1, 12, tzinfo=UTC))
    shown = tmp_path / "shown.key"
    shown.write_bytes(key.read_bytes())
    shown.chmod(0o640)
    (tmp_path / "junk.pem").write_text("junk", encoding="utf-8")
    locked = tmp_path / "locked.pem"
    under_passphrase = serialization.BestAvailableEncryption(b"a passphrase")
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.touch(0o600)
    locked.write_bytes(private.private_bytes(pem, pkcs8, under_passphrase))
    for files, words in (
        ((cert, None, None), "--tls-cert without the rest"),
        ((None, None, cert), "tls-client-ca without the rest"),
        ((cert, other_key, None), "are not a certificate"),
        ((tmp_path / "junk.pem", key, None), "are not a certificate"),
        ((cert, locked, None), "the key has a passphrase"),
        ((cert, tmp_path / "absent", None), "cannot be read"),
        ((cert, shown, None), "has mode 0640, so others than its owner may use it; expected 0600"),
        ((*expired, None), "has a certificate that expired at 2024-05-01 12:00:00 UTC: renew it"),
        ((cert, key, tmp_path / "junk.pem"), "holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)) as refused:
            Tls.load(*files)
        assert re.match("(--)?tls-", str(refused.value))
    done = tokenloom("serve", mixture, "--tls-cert", cert, "--tls-key", other_key)
    assert done.status == 2
    assert done.output.startswith("ConfigError: --tls-cert "), done.output


def test_an_expired_certificate_ends_a_trainer_at_once_with_its_end(authority: Authority) -> None:
    cert, key = authority.issue("127.0.0.1", not_after=datetime(2024, 5, 1, 12, tzinfo=UTC))
    server = grpc.server(ThreadPoolExecutor(1))
    shown = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", shown)
    server.start()
    expired = (
        f"127.0.0.1:{port} has a certificate that expired at 2024-05-01 12:00:00 UTC: renew it"
    )
    url = f"grpcs://127.0.0.1:{port}/{RUN}"
    options = {"token": CONTROL, "tls_ca": authority.file}
    try:
        # The default of 300 s is beyond the bound of a test.
        with (
            dataset(url, attempt="x", **options) as failing,
            pytest.raises(ServerUnavailable, match=expired),
        ):
            next(iter(failing))
        # As long as another server of the address may come, it is waited for.
        both = dataset(
            url.replace(f"/{RUN}", f",127.0.0.1:1/{RUN}"),
            attempt="y",
            connect_timeout_s=2.0,
            **options,
        )
        with both, pytest.raises(ServerUnavailable, match=r"^(?!.*expired at)"):
            next(iter(both))
    finally:
        server.stop(0)


# What is written down


def test_no_secret_is_in_a_log_however_much_is_logged(mixture: Path, tmp_path: Path) -> None:
    password = "a-password-of-the-ledger"
    folder = tmp_path / "redis"
    folder.mkdir()
    ledger = RedisServer(folder).start()
    with redis.Redis(port=ledger.port) as client:
        client.config_set("requirepass", password)
    flags = ("--log-level", "debug")
    options: dict[str, Any] = {"flags": flags, "environment": TOKENS}
    url = f"redis://:{password}@127.0.0.1:{ledger.port}/0"
    server = ServerProcess(tmp_path / "server", mixture, ledger=url, **options).start()
    try:
        with World(server.url(RUN), token=CONTROL) as world:
            world.steps(3)
        headers = {"authorization": f"Bearer {READ}"}
        wrong = "a-wrong-token-0123456789"
        for path in ("/v1/runs", f"/v1/runs/{RUN}/stats", "/metrics", "/nowhere"):
            httpx.get(f"{server.rest_url}{path}", headers=headers, trust_env=False, timeout=120)
            httpx.get(
                f"{server.rest_url}{path}",
                headers={"authorization": f"Bearer {wrong}"},
                trust_env=False,
                timeout=120,
            )
        with (
            dataset(server.url(RUN), token=wrong, attempt="w") as refused,
            pytest.raises(Unauthenticated),
        ):
            next(iter(refused))
        # The ledger goes away and its errors are logged, too.
        ledger.kill()
        time.sleep(0.5)
        figures = httpx.get(
            f"{server.rest_url}/v1/runs/{RUN}/stats", headers=headers, trust_env=False, timeout=120
        ).text
        httpx.post(
            f"{server.rest_url}/v1/runs/{RUN}/snapshots",
            json={},
            headers=headers,
            trust_env=False,
            timeout=120,
        )
        server.terminate()
        written = server.log + figures
        with pytest.raises(RuntimeError, match="cannot be reached") as caught:
            ServerProcess(tmp_path / "again", mixture, ledger=url, **options).start()
        ledger.start()
        with pytest.raises(RuntimeError, match="refuses this user") as refusal:
            wrong_url = url.replace(password, f"not-{password}")
            ServerProcess(tmp_path / "third", mixture, ledger=wrong_url, **options).start()
        written += str(caught.value) + str(refusal.value)
    finally:
        server.kill()
        ledger.kill()

    assert "DEBUG" in written
    for secret in (CONTROL, READ, wrong, password):
        assert secret not in written

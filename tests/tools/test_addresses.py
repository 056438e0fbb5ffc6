"""One form of address for all: either port's, or the URL of a run, for every command and every dataset."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
import trustme
import yaml
from support.corpora import flat, write_corpus
from support.ports import free_port
from support.served import runs_of
from tokenloom import ConnectionOptions, LaunchOptions, RemoteDataset
from tokenloom.errors import ServerUnavailable
from tokenloom_proto.address import ServerAddress, reached_at
from tokenloom_proto.errors import ProtocolError, Unauthenticated
from tokenloom_server.api.auth import Access
from tokenloom_server.api.grpc.server import GrpcServer
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.service import Runs
from tokenloom_server.api.tls import Tls
from tokenloom_server.errors import ConfigError
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_tools.cli.options import ReadAccess
from tokenloom_tools.remote import ServerUnreachable

SHORT = ConnectionOptions(connect_timeout_s=0.2)


class Ports(NamedTuple):
    grpc: str
    rest: str

    def forms(self, run: str) -> list[str]:
        """All that names the server, and with ``/run`` the run."""
        return [
            f"{start}{run}"
            for start in (self.rest, f"http://{self.rest}", f"http://{self.rest}/v1/runs")
        ]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """A server of one run, on all addresses of this machine, as it is in a container."""
    folder = write_corpus(tmp_path_factory.mktemp("served"))
    (folder / "mixture.yaml").write_text(yaml.safe_dump(flat(["txt:data/prose/*.txt:text"])))
    grpc_server, rest = GrpcServer("0.0.0.0:0"), RestServer("0.0.0.0", 0)
    with runs_of(folder, folder / "mixture.yaml") as runs:
        rest.start(runs, grpc_address=grpc_server.address)
        grpc_server.start(runs, rest.address)
        yield Ports(
            *(server.address.replace("0.0.0.0", "127.0.0.1") for server in (grpc_server, rest))
        )
        grpc_server.stop(1)
        rest.stop()


def test_every_form_leads_commands_of_either_port_to_the_run(ports: Ports) -> None:
    forms = [
        *ports.forms(""),
        *ports.forms("/test"),
        f"http://{ports.rest}/v1/runs/test/stats?x=1#token=secret",
    ]
    forms += [ports.grpc, f"{ports.grpc}/test", f"grpc://{ports.grpc}", f"grpc://{ports.grpc}/test"]
    access = ReadAccess()
    for form in forms:
        assert [each.run for each in access.connect(form).stats()] == ["test"], form
        servers = access.servers(form)
        assert (servers.run, servers.targets) == ("test", (ports.grpc,)), form
    standby = f"grpc://127.0.0.1:{free_port()},{ports.grpc}/test"
    assert access.connect(standby).only_run() == "test"


def test_of_several_servers_commands_ask_the_one_that_can_serve(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "served")
    (folder / "mixture.yaml").write_text(yaml.safe_dump(flat(["txt:data/prose/*.txt:text"])))
    with runs_of(folder, folder / "mixture.yaml") as leads:
        ledger = SqliteLedger(folder / "ledger.db")
        stands_by = Runs(ledger, "standby", standby=True)
        stands_by.add(folder / "mixture.yaml", None)
        ends = [RestServer("127.0.0.1", 0) for _ in range(2)]
        for end, runs in zip(ends, (stands_by, leads), strict=True):
            end.start(runs)
        standby, leader = (end.address for end in ends)
        for several in (
            f"http://{standby},{leader}",
            f"http://127.0.0.1:{free_port()},{leader},{standby}/test",
        ):
            remote = ReadAccess().connect(several)
            assert (remote.url, remote.only_run()) == (f"http://{leader}", "test")
        for end in ends:
            end.stop()
        stands_by.stop()
        ledger.close()


def test_every_form_is_a_datasets(ports: Ports) -> None:
    forms = [
        *ports.forms(""),
        *ports.forms("/test"),
        f"{ports.grpc}/test",
        f"grpc://{ports.grpc}/test",
    ]
    for form in forms:
        with RemoteDataset(
            form, 1, rank=0, world_size=1, resume="fresh", launch=LaunchOptions(takeover=True)
        ) as dataset:
            assert dataset.run == "test", form
            if form == forms[0]:
                assert isinstance(next(iter(dataset))["input_ids"], torch.Tensor)


def test_over_tls_and_with_a_token_the_other_port_is_asked_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, token = trustme.CA(), "a-token-of-many-characters"
    own = ca.issue_cert("127.0.0.1")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    own.private_key_pem.write_to_path(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    ca.cert_pem.write_to_path(tmp_path / "ca")
    folder = write_corpus(tmp_path / "served")
    (folder / "mixture.yaml").write_text(yaml.safe_dump(flat(["txt:data/prose/*.txt:text"])))
    access = Access(token, tls=Tls.load(tmp_path / "cert", tmp_path / "key", None))
    grpc_server, rest = GrpcServer("127.0.0.1:0", access), RestServer("127.0.0.1", 0, access)
    monkeypatch.setenv("TOKENLOOM_TOKEN", token)
    monkeypatch.setenv("TOKENLOOM_TLS_CA", str(tmp_path / "ca"))
    with runs_of(folder, folder / "mixture.yaml") as runs:
        rest.start(runs, grpc_address=grpc_server.address)
        grpc_server.start(runs, rest.address)
        caller = ReadAccess()
        for form in (
            f"grpcs://{grpc_server.address}",
            f"https://{rest.address}/test",
            rest.address,
        ):
            assert caller.connect(form).only_run() == "test", form
            assert caller.servers(form).targets == (grpc_server.address,), form
        options = ConnectionOptions(tls_ca=tmp_path / "ca")
        with RemoteDataset(
            f"https://{rest.address}", 1, rank=0, world_size=1, connection=options
        ) as dataset:
            assert len(next(iter(dataset))["sample_ids"]) == 1
        with pytest.raises(Unauthenticated):
            RemoteDataset(
                f"https://{rest.address}",
                1,
                connection=replace(options, token="another-token-of-many"),
            )
        grpc_server.stop(1)
        rest.stop()


@pytest.mark.parametrize(
    "text", ["ftp://x:1", "nowhere", "", "http://", "a:b", "grpc://x/run", "http://a:1,/x#token=s"]
)
def test_what_is_no_address_is_refused_with_the_forms_that_are(text: str) -> None:
    for ask in (ReadAccess().connect, ReadAccess().servers, lambda text: RemoteDataset(text, 1)):
        with pytest.raises(
            (ConfigError, ValueError), match=r"expected HOST:PORT|expected grpc://HOST:PORT"
        ) as refused:
            ask(text)
        assert "token=s" not in str(refused.value)


class _Stranger(http.server.BaseHTTPRequestHandler):
    tokens: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.tokens.append(self.headers["Authorization"])
        self.send_response(200 if self.path == "/v1/runs" else 404)
        self.end_headers()
        self.wfile.write(b'{"runs": 3}')

    def log_message(self, *_: object) -> None:
        pass


def test_another_server_than_tokenlooms_is_said_to_be_one() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{stranger.server_port}"
        with pytest.raises(ProtocolError, match="not a Tokenloom server"):
            ReadAccess().servers(url)
        with pytest.raises(ProtocolError, match="not a Tokenloom server"):
            RemoteDataset(url, 1)
        stranger.shutdown()


def test_a_port_that_is_another_servers_never_gets_the_token(
    ports: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the ports of a container are published under other numbers, and theirs are another project's."""
    token = "a-token-of-many-characters"
    monkeypatch.setenv("TOKENLOOM_TOKEN", token)
    folder = write_corpus(tmp_path / "served")
    (folder / "mixture.yaml").write_text(yaml.safe_dump(flat(["txt:data/prose/*.txt:text"])))
    grpc_server, rest = (
        GrpcServer("127.0.0.1:0", Access(token)),
        RestServer("127.0.0.1", 0, Access(token)),
    )
    with (
        runs_of(folder, folder / "mixture.yaml") as runs,
        http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as stranger,
    ):
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        grpc_server.start(runs, f"127.0.0.1:{stranger.server_port}")
        rest.start(runs, grpc_address=ports.grpc)
        with pytest.raises(ServerUnreachable, match="healthz"):
            ReadAccess().connect(grpc_server.address)
        with pytest.raises(ServerUnreachable, match="are two servers, though one says"):
            ReadAccess().servers(rest.address)
        assert ReadAccess().connect(rest.address).only_run() == "test"
        assert set(_Stranger.tokens) == {None}
        stranger.shutdown()
        grpc_server.stop(1)
        rest.stop()


def test_where_nothing_answers_the_address_is_named() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnavailable, match=f"{nobody}.*no answer"):
        RemoteDataset(nobody, 1)
    with pytest.raises(ServerUnreachable, match=f"{nobody}.*no answer"):
        ReadAccess().connect(nobody)
    # It may be gRPC's, for which a Join waits.
    with (
        RemoteDataset(f"{nobody}/test", 1, connection=SHORT) as dataset,
        pytest.raises(ServerUnavailable),
    ):
        next(iter(dataset))


def test_a_servers_other_port_is_reached_at_the_host_that_was_named() -> None:
    assert reached_at("0.0.0.0:50051", "data.example:80") == "data.example:50051"
    assert reached_at("[::]:1", "[::1]:2") == "[::1]:1"
    # Its certificate may be for that name alone, and loopback is another machine here.
    for address in ("10.0.0.1:50051", "127.0.0.1:50051", "[::1]:50051"):
        assert reached_at(address, "data.example:80") == "data.example:50051"
    assert ServerAddress.parse("https://data.example/v1/runs/a%20b") == ServerAddress(
        "https", ("data.example:443",), "a b"
    )

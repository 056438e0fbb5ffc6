"""The address of a run."""

from __future__ import annotations

import pytest
from tokenloom_proto.address import Address


@pytest.mark.parametrize(
    ("url", "targets", "run"),
    [
        ("grpc://127.0.0.1:50051/wiki-and-code", ("127.0.0.1:50051",), "wiki-and-code"),
        ("grpc://data.example:1/a%20b", ("data.example:1",), "a b"),
        ("grpc://[::1]:50051/run", ("[::1]:50051",), "run"),
        ("grpc://a:1,[::1]:2/run", ("a:1", "[::1]:2"), "run"),
    ],
)
def test_a_url_names_a_server_and_a_run(url: str, targets: tuple[str, ...], run: str) -> None:
    assert Address.parse(url) == Address(targets, run)
    secure = Address.parse(url.replace("grpc://", "grpcs://"))
    assert secure == Address(targets, run, tls=True)
    assert Address.parse(str(secure)) == secure


def test_the_hosts_of_a_url_are_without_their_ports() -> None:
    assert Address.parse("grpc://a:1,[::1]:2,127.0.0.1:3/run").hosts == ("a", "[::1]", "127.0.0.1")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:50051/run",
        "http://127.0.0.1:50051/run",
        "grpc://127.0.0.1/run",
        "grpc://127.0.0.1:50051",
        "grpc://127.0.0.1:50051/",
        "grpc://127.0.0.1:50051/run/more",
        "grpc://127.0.0.1:notaport/run",
        "grpc://127.0.0.1:99999/run",
        "grpc://user@127.0.0.1:50051/run",
        "grpc://127.0.0.1:50051/run?stream=train",
    ],
)
def test_any_other_text_is_refused_with_the_expected_form(url: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected grpc://HOST:PORT/RUN, such as grpc://127\.0\.0\.1:50051"
    ):
        Address.parse(url)

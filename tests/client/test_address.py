"""The address of a run."""

from __future__ import annotations

import pytest
from tokenloom.address import Address


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
    with pytest.raises(ValueError, match=r"expected grpc://HOST:PORT/RUN, such as grpc://127\.0\.0\.1:50051"):
        Address.parse(url)

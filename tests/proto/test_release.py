"""Releases: one minor version apart works, further is refused with both."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import tokenloom
from tokenloom_proto.errors import ProtocolError
from tokenloom_proto.versions import own_release, require_compatible
from tokenloom_tools.cli.app import app
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("client", "server"),
    [
        ("0.1.0", "0.1.7"),
        ("0.1.0", "0.2.0"),
        ("0.3.1", "0.2.9"),
        ("0.2.0.dev3+g1a2b3c", "0.1.0"),
        ("1.0.0rc1", "1.1"),
        ("", "9.0"),
        ("0.1.0", ""),
    ],
)
def test_one_minor_version_apart_works_and_what_is_not_known_is_left_to_the_wire(
    client: str, server: str
) -> None:
    require_compatible(client, server)


@pytest.mark.parametrize(
    ("client", "server"), [("0.1.0", "0.3.0"), ("0.4.0.dev1", "0.2.0"), ("1.0.0", "0.9.0")]
)
def test_further_is_refused_with_both_and_what_to_install(client: str, server: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        require_compatible(client, server)
    install = ".".join(server.split(".")[:2])
    assert f"client is Tokenloom {client}, and this server {server}" in str(refused.value)
    assert f"install tokenloom {install} where the trainers run" in str(refused.value)


@pytest.mark.parametrize("text", ["main", "1", "0.1.0\n", "0.1" + "9" * 70, "٠.١"])
def test_what_is_no_release_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="release: the client says"):
        require_compatible(text, "0.1.0")


def test_the_release_that_join_carries_is_what_python_and_the_command_say() -> None:
    assert own_release() == version("tokenloom") == tokenloom.__version__
    assert CliRunner().invoke(app, ["--version"]).stdout == f"tokenloom {own_release()}\n"

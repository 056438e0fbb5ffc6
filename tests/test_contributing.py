"""CONTRIBUTING.md names files and commands; they have to be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Paths are written from the root, or from the server's package where that was named before.
STARTS = (ROOT, ROOT / "server" / "tokenloom_server")
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WORDS = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))


@pytest.mark.parametrize(
    "path", [word for word in WORDS if re.fullmatch(r"[\w./-]+(/|\.(py|md|toml|txt|proto))", word)]
)
def test_the_file_is_there(path: str) -> None:
    assert any((start / path).exists() for start in STARTS)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make (\w+)`", TEXT))))
def test_the_makefile_has_the_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["BUILT_IN", "Scheme", "Source", "Packer", "Policy", "Ledger", "State", "ORDER_VERSION"]
)
def test_the_name_is_defined(name: str) -> None:
    assert f"`{name}`" in TEXT
    defined = re.compile(rf"^(class |def )?{name}\b(\(| =|:)", re.MULTILINE)
    assert any(defined.search(path.read_text(encoding="utf-8")) for path in STARTS[1].rglob("*.py"))

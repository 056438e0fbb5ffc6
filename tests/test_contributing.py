"""CONTRIBUTING.md names files and commands; they have to be there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Paths are written from the root, or from the server's package where that was named before.
STARTS = (ROOT, ROOT / "server" / "tokenloom_server", ROOT / "server" / "tokenloom_tools")
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


def test_the_first_changes_apply_and_their_tests_pass(tmp_path: Path) -> None:
    for part in (
        "server",
        "tests/support",
        "tests/conftest.py",
        "tests/exhaustive.toml",
        "pyproject.toml",
    ):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (tmp_path / part).parent.mkdir(exist_ok=True)
        copy(ROOT / part, tmp_path / part)
    changes = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
    tests = [
        path
        for change in changes
        for path in re.findall(r"^\+\+\+ (tests/\S+)", change, re.MULTILINE)
    ]
    (tmp_path / "changes.diff").write_text("".join(changes), encoding="utf-8")

    subprocess.run(["git", "apply", "-p0", "changes.diff"], cwd=tmp_path, check=True)
    paths = (tmp_path / "server", ROOT / "proto", ROOT / "client")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (len(changes), len(tests)) == (4, 4)
    assert done.returncode == 0, done.stdout + done.stderr

"""What a release is made by: workflows, lower bounds, promises. ``make release-check`` runs the rest."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client/tokenloom", "server/tokenloom_server", "proto/tokenloom_proto")
#: Of an action: its repository, the commit, and the release that the commit is.
ACTION = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["ci.yml", "newest.yml", "nightly.yml", "release.yml"])
def test_actions_stand_by_commit_and_jobs_have_a_limit_and_few_rights(name: str) -> None:
    content = text(f".github/workflows/{name}")
    assert [
        line for line in content.splitlines() if "uses:" in line and not ACTION.search(line)
    ] == []
    workflow = yaml.safe_load(content)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert "${{" not in step.get("run", "").replace("${{ matrix.", ""), (
                "what others may write is no code"
            )


def test_nothing_is_published_before_it_was_built_tried_and_signed() -> None:
    jobs = yaml.safe_load(text(".github/workflows/release.yml"))["jobs"]
    needs = {name: job.get("needs") for name, job in jobs.items()}
    assert needs.pop("publish") == ["attest", "images"]
    assert (needs.pop("image"), needs.pop("images")) == ("installs", "image")
    assert needs == {"build": None, "installs": "build", "attest": "installs", "notes": "publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in jobs["publish"]["steps"][-1]["with"]


def test_hooks_run_the_programs_whose_versions_the_lock_pins() -> None:
    (local,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert {hook["entry"].split()[0] for hook in local["hooks"]} == {
        ".venv/bin/ruff",
        ".venv/bin/mypy",
    }
    assert (
        len(re.findall(r"^(?:ruff|mypy)==[\d.]+$", text("requirements/tests.txt"), re.MULTILINE))
        == 2
    )


def test_the_table_of_lower_bounds_is_pyprojects_and_its_exceptions_are_not_used() -> None:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    users = [
        lines
        for extra, lines in project["optional-dependencies"].items()
        if extra not in ("dev", "docs")
    ]
    named = [Requirement(line) for lines in (project["dependencies"], *users) for line in lines]
    lower = {
        need.name: [each.version for each in need.specifier if each.operator == ">="]
        for need in named
    }
    bounds = {name: "".join(versions) for name, versions in lower.items() if name != "tokenloom"}
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| ([\d.]+) \| ", text("SECURITY.md"), re.MULTILINE))
    rest = re.findall(
        r"for the lower bounds of (.+?)\s+and\s+(\w+)\. ", text("SECURITY.md"), re.DOTALL
    )
    assert rows.items() <= bounds.items()
    assert {*re.split(r",\s+", rest[0][0]), rest[0][1]} == bounds.keys() - rows.keys()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        assert not re.search(
            "json_format|zerocopy", path.read_text(encoding="utf-8"), re.IGNORECASE
        ), path


def test_each_promise_of_stability_names_tests_that_are_there() -> None:
    rows = re.findall(r"^\| \*\*.*$", text("docs/stability.md"), re.MULTILINE)
    for row in rows:
        tests = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", row)
        assert tests
        assert [name for path, name in tests if f"def {name}(" not in text(path)] == []

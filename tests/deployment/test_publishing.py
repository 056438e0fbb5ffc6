"""What a release is made by: workflows, lower bounds, locked packages, templates. ``make release-check`` runs it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
#: Of an action: its repository, the commit, and the release that the commit is.
ACTION = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def named() -> Iterator[Requirement]:
    """What the wheel asks for, in any of its extras but the developers' and the site's."""
    extras = PROJECT["project"]["optional-dependencies"]
    for extra, lines in (("", PROJECT["project"]["dependencies"]), *extras.items()):
        if extra not in ("dev", "docs"):
            yield from (need for line in lines if (need := Requirement(line)).name != "tokenloom")


def locked(name: str) -> dict[str, set[Version]]:
    """The versions in a file of ``requirements/``; several where Pythons differ. Each has a hash."""
    found: dict[str, set[Version]] = {}
    for line, hashes in re.findall(r"^(\S+==.+) \\\n((?: +--hash=sha256:[0-9a-f]{64}.*\n)+)", text(name), re.MULTILINE):
        assert hashes
        package, _, version = line.split(" ")[0].partition("==")
        found.setdefault(package, set()).add(Version(version))
    assert len(re.findall(r"^[a-z]", text(name), re.MULTILINE)) == sum(map(len, found.values()))
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_stand_by_commit_and_jobs_have_a_limit_and_few_rights(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    assert [line for line in lines if not ACTION.search(line)] == []

    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 30
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
        for step in job["steps"]:
            assert "${{" not in step.get("run", "").replace("${{ matrix.", ""), "what others may write is no code"
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


def test_one_version_of_each_action() -> None:
    used = {line.strip(" -") for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line}
    names = [line.split("@")[0] for line in used]
    assert len(names) == len({*names}), sorted(used)


def test_nothing_is_published_before_it_was_built_tried_and_signed() -> None:
    jobs = yaml.safe_load(text(".github/workflows/release.yml"))["jobs"]

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else {*needs}
        return direct.union(*(before(need) for need in direct))

    assert before("publish") == {"build", "installs", "attest", "image"}
    assert before("image") >= {"build", "installs"}
    assert {name for name in jobs if "id-token" in jobs[name].get("permissions", {})} == {"attest", "image", "publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    publishing = jobs["publish"]["steps"][-1]
    assert "password" not in publishing["with"]
    assert 'make release-check PYTHON=python TAG="$GITHUB_REF_NAME"' in str(jobs["build"]["steps"])


def test_hooks_run_the_programs_whose_versions_constraints_pin() -> None:
    (local,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert local["repo"] == "local"
    programs = {hook["entry"].split()[0] for hook in local["hooks"]}
    assert programs == {".venv/bin/ruff", ".venv/bin/mypy"}
    for program in programs:
        assert re.search(rf"^{Path(program).name}==[\d.]+$", text("constraints.txt"), re.MULTILINE)


def test_templates_and_dependabot_are_read() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    assert len(forms) == 3
    for form in forms:
        assert "body" not in form or {"name", "description"} <= form.keys()
    updates = yaml.safe_load(text(".github/dependabot.yml"))["updates"]
    assert {update["package-ecosystem"] for update in updates} >= {"github-actions", "docker", "pip"}


def test_the_table_of_lower_bounds_is_pyprojects() -> None:
    bounds = {need.name: {spec.version for spec in need.specifier if spec.operator == ">="} for need in named()}
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| ([\d.]+) \| ", text("SECURITY.md"), re.MULTILINE))
    assert len(rows) > 10
    for package, bound in rows.items():
        assert bounds[package] >= {bound}, package
    rest = text("SECURITY.md").split("Nothing was found for the lower bounds of ")[1].split(" and xxhash. ")[0]
    assert {*re.split(r",\s+", rest), "xxhash"} == bounds.keys() - rows.keys()


def test_what_is_excepted_of_the_table_is_not_used() -> None:
    for package in ("client/tokenloom", "server/tokenloom_server", "proto/tokenloom_proto"):
        for path in (ROOT / package).rglob("*.py"):
            content = path.read_text(encoding="utf-8")
            assert "json_format" not in content, path
            assert "zerocopy" not in content.lower(), path


def test_the_images_packages_are_what_the_extras_and_the_constraints_ask_for() -> None:
    packages = locked("requirements/image.txt")
    (image,) = re.findall(r"^compile image (.*)$", text(".ci/lock"), re.MULTILINE)
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [
        *PROJECT["project"]["dependencies"],
        *(one for e in re.findall(r"--extra (\S+)", image) for one in extras[e]),
    ]
    for need in map(Requirement, lines):
        name = need.name.lower().replace("_", "-")
        assert name == "tokenloom" or all(version in need.specifier for version in packages[name]), need
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", text("constraints.txt"), re.MULTILINE))
    for name in packages.keys() & {name.lower() for name in pinned}:
        assert packages[name] == {Version(pinned[name])}, name
    assert "torch" not in packages
    assert locked("requirements/release.txt").keys() >= {*PROJECT["dependency-groups"]["release"]}


def test_each_promise_of_stability_names_tests_that_are_there() -> None:
    page = text("docs/stability.md")
    tests = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", page)
    assert len(tests) > 10
    for path, name in tests:
        assert f"def {name}(" in text(path), name
    for row in re.findall(r"^\| \*\*.*$", page, re.MULTILINE):
        assert "::test_" in row
    assert len(page.split()) <= 600

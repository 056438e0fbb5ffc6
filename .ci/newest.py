"""What will break tomorrow: the newest release of every package, against what meets other people's files and classes.

    .ci/newest.py [NAME ...]        by default all of: trainers, mosaic, litdata

Each environment lies under .cache/newest. It has no lock and no bounds but torch's, whose newer releases have no CPU
build; packages that exclude each other have environments of their own. Printed are the packages that are newer than the
lock's, and the tests that fail with them. The exit status is 1 where a test failed or a package does not install.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "newest"
TORCH = next(
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)
#: What the other writers ask for and nothing that is tested needs: vision's classes do not load with the CPU build of
#: torch, and Mosaic's old transformers excludes the newest huggingface_hub.
WITHOUT = {"torch", "torchvision", "torchaudio", "transformers"}
#: What the tests of other writers do not meet, and what these writers exclude in turn.
FRAMEWORKS = {"trl", "accelerate", "jax", "orbax-checkpoint", "ray", "torchdata", "wandb"}
#: Formats, chats, tokenisers, frameworks, the page, Prometheus.
FORMATS = ["tests/sources", "tests/storage"]
TRAINERS = [
    *FORMATS,
    "tests/order/test_chats.py",
    "tests/tokenizer",
    "tests/integrations",
    "tests/api/test_metrics.py",
    "tests/api/test_page.py",
    "tests/deployment/test_prometheus.py",
]


@dataclass(frozen=True)
class Environment:
    """Packages that get along with each other, and the tests that meet them."""

    name: str
    tests: list[str]
    #: One whose own needs come first, in place of the others' newest: it excludes some of these. Without frameworks.
    leading: str | None = None


ENVIRONMENTS = (
    Environment("trainers", TRAINERS),
    Environment(
        "mosaic", ["tests/sources/test_mds.py", "tests/tools/test_moving.py"], "mosaicml-streaming"
    ),
    Environment(
        "litdata", ["tests/sources/test_litdata.py", "tests/tools/test_moving.py"], "litdata"
    ),
)


def run(*command: object, **options: object) -> str:
    """A command's standard output. Raises ``CalledProcessError``."""
    return str(subprocess.check_output([str(part) for part in command], text=True, **options))  # type: ignore[call-overload]


def name_of(line: str) -> str:
    """Of what a requirement is."""
    return re.split(r"[^\w.-]", line, maxsplit=1)[0]


def wanted() -> list[str]:
    """What pyproject.toml asks for in any extra, without upper bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [line for extra in project["optional-dependencies"].values() for line in extra]
    lines = [
        line for line in (*project["dependencies"], *lines) if not line.startswith("tokenloom[")
    ]
    return [re.sub(r",?<[\w.]+", "", line) for line in lines if not line.startswith("torch>=")]


def needs_of(python: Path, package: str) -> list[str]:
    """What an installed package asks for, but for what is left out."""
    script = (
        "import importlib.metadata as m, json, sys; from packaging.requirements import Requirement as R; "
        "print(json.dumps([str(r) for r in map(R, m.requires(sys.argv[1]) or []) "
        "if r.marker is None or r.marker.evaluate({'extra': ''})]))"
    )
    lines: list[str] = json.loads(run(python, "-c", script, package))
    return [line for line in lines if name_of(line) not in WITHOUT]


def install(environment: Environment) -> Path:
    """A new environment's Python. Raises ``CalledProcessError`` where its packages exclude each other."""
    folder = FOLDER / environment.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{TORCH}\n", encoding="utf-8")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        "--upgrade",
    ]
    run(*pip, "pip", "packaging")
    pip += ["-c", constraints]
    run(*pip, "torch")
    # These two by their own: with their needs, pip would take an older release of theirs before a conflict.
    for package in ("mosaicml-streaming", "litdata"):
        run(*pip, "--no-deps", package)
    needs = needs_of(python, environment.leading) if environment.leading else []
    left_out = {name_of(line) for line in needs} | FRAMEWORKS if environment.leading else set[str]()
    run(*pip, *(line for line in wanted() if name_of(line) not in left_out), *needs)
    run(*pip, "--no-deps", "-e", ROOT)
    return python


def newer(python: Path) -> list[str]:
    """The packages whose version is not the lock's."""
    listed = json.loads(
        run(python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check")
    )
    text = "".join(
        (ROOT / "requirements" / name).read_text(encoding="utf-8")
        for name in ("tests.txt", "no-deps.txt")
    )
    locked: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE):
        locked.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    found = {
        re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"].partition("+")[0]
        for each in listed
    }
    return [
        f"{name} {' or '.join(sorted(locked.get(name, {'(not locked)'})))} -> {version}"
        for name, version in sorted(found.items())
        if version not in locked.get(name, ()) and name not in ("tokenloom", "pip")
    ]


def main() -> None:
    chosen = sys.argv[1:]
    if unknown := set(chosen) - {each.name for each in ENVIRONMENTS}:
        sys.exit(
            f"{', '.join(sorted(unknown))}: expected any of {', '.join(each.name for each in ENVIRONMENTS)}"
        )
    failed = []
    for environment in ENVIRONMENTS:
        if chosen and environment.name not in chosen:
            continue
        began = time.monotonic()
        print(f"\n== {environment.name}: making its environment", flush=True)
        try:
            python = install(environment)
        except subprocess.CalledProcessError as error:
            print(
                f"== {environment.name}: does not install: {' '.join(map(str, error.cmd[-4:]))}",
                flush=True,
            )
            failed.append(environment.name)
            continue
        print(*(f"    {line}" for line in newer(python)), sep="\n", flush=True)
        # Commands that tests start are those of this environment.
        path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        command = [
            python,
            "-m",
            "pytest",
            "-n",
            os.environ.get("JOBS", "3"),
            "--dist",
            "worksteal",
            "-q",
        ]
        # Those that only make test-all runs, too.
        command += ["-m", "not readers"]
        # mlflow-skinny excludes a package as the others have it; nothing here makes it the environment that it needs.
        command += [
            "--deselect",
            "tests/integrations/test_trackers.py::test_mlflow_has_them_in_its_store",
        ]
        tests = [path for path in environment.tests if (ROOT / path).exists()]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests], cwd=ROOT, env=os.environ | path
        )
        took = time.monotonic() - began
        print(
            f"== {environment.name}: exit status {done.returncode} after {took:.0f} s", flush=True
        )
        if done.returncode:
            failed.append(environment.name)
    if failed:
        sys.exit(
            f"fails with the newest packages: {', '.join(failed)}. CONTRIBUTING.md says what to do with that"
        )
    print("\nnothing fails with the newest packages")


if __name__ == "__main__":
    main()

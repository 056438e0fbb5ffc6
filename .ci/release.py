"""Could this commit go out? Builds and tries all that a release publishes, from a clean clone, and uploads nothing.

    .ci/release.py [--tag v0.1.0] [--out DIR] [--without-tests]

The release workflow runs it with its tag, before anything is published. DIR gets ``packages/`` (sdist and wheel), the
SBOM of the image and the notes. Committed files count alone. Takes a Python of at least 3.11, git, and
the package index.
"""

from __future__ import annotations

import argparse
import email.parser
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
#: A link of Markdown that is relative, and so leads nowhere on the package index.
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#|mailto:)[^)]+\)")


class Refused(Exception):
    """Why this commit is no release, and what to do."""


@dataclass
class Check:
    """One clone of the commit, and what was made of it so far."""

    clone: Path
    work: Path
    out: Path
    tag: str | None
    version: str = ""

    @property
    def wheel(self) -> Path:
        return self.out / "packages" / f"tokenloom-{self.version}-py3-none-any.whl"

    @property
    def tools(self) -> Path:
        return self.work / "tools" / "bin"

    @property
    def image(self) -> Path:
        """The commands of the environment that the image has."""
        return self.work / "image" / "bin"


def run(*command: object, **options: object) -> str:
    """A command's standard output. Raises ``Refused`` with all that it wrote where it fails."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )  # type: ignore[call-overload]
    if done.returncode != 0:
        raise Refused(
            f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}".rstrip()
        )
    return str(done.stdout)


def install_locked(check: Check, commands: Path, name: str) -> None:
    """Exactly the packages of a file, each with a hash that stands there."""
    uv = [check.tools / "uv", "pip", "install", "--quiet", "--python", commands / "python"]
    run(
        *uv, "--only-binary", ":all:", "--require-hashes", "-r", check.clone / "requirements" / name
    )


def version_and_tag(check: Check) -> str:
    project = tomllib.loads((check.clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    check.version = project["version"]
    if RELEASE.fullmatch(check.version) is None:
        raise Refused(
            f"pyproject.toml: version is {check.version!r}; expected a release such as 0.2.0 or 0.2.0rc1"
        )
    for package in ("client", "server", "proto"):
        for path in (check.clone / package).rglob("*.py"):
            lines = [
                line
                for line in path.read_text(encoding="utf-8").splitlines()
                if f'"{check.version}"' in line
            ]
            if any("examples=" not in line for line in lines):
                raise Refused(
                    f"{path.relative_to(check.clone)}: {lines}: the release stands in pyproject.toml alone"
                )
    if check.tag is not None and check.tag != f"v{check.version}":
        raise Refused(
            f"the tag is {check.tag}, and pyproject.toml has {check.version}: tag v{check.version}, or set it there"
        )
    return f"{check.version}, " + (f"tag {check.tag}" if check.tag else "no tag here yet")


def changelog(check: Check) -> str:
    """The release's section, which becomes the notes. A tagged one has its date, and nothing waits for the next."""
    text = (check.clone / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = {
        match[1]: match
        for match in re.finditer(r"^## (\S+)(.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    }
    section = sections.get(check.version)
    if section is None or not section[3].strip():
        raise Refused(
            f"CHANGELOG.md: expected a section '## {check.version} - DATE' with what changed; it has {[*sections]}"
        )
    dated = re.fullmatch(r" - \d{4}-\d\d-\d\d", section[2]) is not None
    if check.tag is not None and not dated:
        raise Refused(
            f"CHANGELOG.md: '{section[0].splitlines()[0]}' has no date; expected '## {check.version} - YYYY-MM-DD'"
        )
    if check.tag is not None and "Unreleased" in sections and sections["Unreleased"][3].strip():
        raise Refused(f"CHANGELOG.md: entries stand under Unreleased; move them to {check.version}")
    (check.out / "notes.md").write_text(section[3].strip() + "\n", encoding="utf-8")
    return f"{len(section[3].split())} words" + (
        "" if dated else ", its date is still to be written"
    )


def tools(check: Check) -> str:
    """uv first, which installs the others in a tenth of pip's time."""
    text = (check.clone / "requirements" / "release.txt").read_text(encoding="utf-8")
    (uv,) = re.findall(r"^uv==.*\n(?: .*\n)+", text, re.MULTILINE)
    (check.work / "uv.txt").write_text(uv, encoding="utf-8")
    run(sys.executable, "-m", "venv", check.tools.parent)
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--require-hashes"]
    run(check.tools / "python", "-m", "pip", "install", *options, "-r", check.work / "uv.txt")
    install_locked(check, check.tools, "release.txt")
    return "requirements/release.txt, by hashes"


def locks(check: Check) -> str:
    """The locked packages are what pyproject.toml and constraints.txt ask for, and what they bring."""
    again = check.work / "locks"
    shutil.copytree(check.clone / "requirements", again)
    run(
        check.clone / ".ci" / "lock",
        env={**os.environ, "OUT": str(again), "UV": str(check.tools / "uv")},
    )
    stale = [
        path.name
        for path in sorted(again.iterdir())
        if not filecmp.cmp(path, check.clone / "requirements" / path.name, False)
    ]
    if stale:
        raise Refused(
            f"requirements: {', '.join(stale)} differ from what make lock writes: run it and commit"
        )
    return f"{', '.join(path.name for path in sorted(again.iterdir()))} are current"


def packages(check: Check) -> str:
    """An sdist, the wheel that is built of it, and the one of the tree, which is the same to the byte."""
    folder = check.out / "packages"
    run(check.tools / "python", "-m", "build", "--no-isolation", "--outdir", folder, check.clone)
    run(
        check.tools / "python",
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        check.work / "tree",
        cwd=check.clone,
    )
    expected = {f"tokenloom-{check.version}.tar.gz", check.wheel.name}
    if (names := {path.name for path in folder.iterdir()}) != expected:
        raise Refused(f"built {sorted(names)}; expected {sorted(expected)}")
    if not filecmp.cmp(check.wheel, check.work / "tree" / check.wheel.name, shallow=False):
        raise Refused(
            "the wheel built from the sdist differs from the one of the tree: what does the sdist leave out?"
        )
    return ", ".join(
        f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)" for path in sorted(folder.iterdir())
    )


def description(check: Check) -> str:
    """The package index takes the metadata and shows the readme."""
    run(check.tools / "twine", "check", "--strict", *sorted((check.out / "packages").iterdir()))
    with zipfile.ZipFile(check.wheel) as archive:
        text = archive.read(f"tokenloom-{check.version}.dist-info/METADATA").decode()
    metadata = email.parser.Parser().parsestr(text)
    if metadata["Version"] != check.version:
        raise Refused(
            f"the wheel's metadata have version {metadata['Version']}; expected {check.version}"
        )
    if links := RELATIVE_LINK.findall(str(metadata.get_payload())):
        raise Refused(f"README.md: these lead nowhere on the package index: {links}")
    return f"metadata {metadata['Metadata-Version']}, the readme renders and its links are whole"


def environment(check: Check) -> str:
    """The image's packages by their hashes, the wheel, and nothing else."""
    run(sys.executable, "-m", "venv", check.image.parent)
    install_locked(check, check.image, "image.txt")
    run(
        check.image / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        check.wheel,
    )
    run(check.image / "python", "-m", "pip", "check")
    if (shown := run(check.image / "tokenloom", "--version")) != f"tokenloom {check.version}\n":
        raise Refused(f"tokenloom --version says {shown!r}; expected {check.version}")
    return f"{len(json.loads(run(check.image / 'python', '-m', 'pip', 'list', '--format', 'json')))} packages"


def sbom(check: Check) -> str:
    path = check.out / f"tokenloom-{check.version}.cdx.json"
    options = [
        "--output-reproducible",
        "--mc-type",
        "application",
        "--pyproject",
        check.clone / "pyproject.toml",
    ]
    run(
        check.tools / "cyclonedx-py",
        "environment",
        *options,
        "--output-file",
        path,
        check.image / "python",
    )
    document = json.loads(path.read_text(encoding="utf-8"))
    parts = [document["metadata"]["component"], *document["components"]]
    listed = {(part["name"].lower(), part["version"]) for part in parts}
    installed = json.loads(run(check.image / "python", "-m", "pip", "list", "--format", "json"))
    if missing := {(part["name"].lower(), part["version"]) for part in installed} - listed:
        raise Refused(f"the SBOM lacks {sorted(missing)}")
    return f"{path.name}, {len(listed)} components"


def trial(check: Check) -> str:
    """A client in an empty environment reads a run of the installed server, to a known digest."""
    options = [
        "--wheel",
        check.wheel,
        "--client",
        sys.executable,
        "--server",
        check.image / "tokenloom",
    ]
    return run(
        sys.executable, check.clone / ".ci" / "installs.py", "newest", *options
    ).splitlines()[-1]


def bases(check: Check) -> str:
    """Whether the image's bases and Redis stand by digest; the workflow has them looked up."""
    return ", ".join(run(check.clone / ".ci" / "pin-images", "--check").splitlines())


def containers(check: Check) -> str:
    """The image and the Compose file in an engine, where there is one."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True).returncode
    ):
        return "left out: no engine runs here"
    return run("make", "compose-test", f"PYTHON={sys.executable}", cwd=check.clone).splitlines()[-1]


def tests(check: Check) -> str:
    """All tests, those that are slow and rarely informative too, in an order drawn anew."""
    return (
        run("make", "test-all", f"PYTHON={sys.executable}", cwd=check.clone)
        .splitlines()[-1]
        .strip("= ")
    )


#: In this order; each needs those before it.
STEPS: tuple[Callable[[Check], str], ...] = (
    *(version_and_tag, changelog, tools, locks, packages, description, environment, sbom, trial),
    *(bases, containers, tests),
)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--tag",
        help="the release's tag; by default the commit's own that begins with v, if it has one",
    )
    options.add_argument(
        "--out", type=Path, help="a new folder for what is built; by default nothing is kept"
    )
    options.add_argument(
        "--without-tests", action="store_true", help="leave the two kinds of tests to others"
    )
    chosen = options.parse_args()
    steps = [step for step in STEPS if step not in (containers, tests) or not chosen.without_tests]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        out: Path = (chosen.out or work / "out").absolute()
        out.mkdir(parents=True)
        try:
            if changed := run("git", "status", "--porcelain", cwd=ROOT).splitlines():
                print(
                    f"note: {len(changed)} files have changes that are not committed, and are no part of this",
                    flush=True,
                )
            run("git", "clone", "--quiet", "--no-hardlinks", ROOT, work / "clone")
            tags = run("git", "tag", "--points-at", "HEAD", "v*", cwd=work / "clone").split()
            check = Check(work / "clone", work, out, chosen.tag or next(iter(tags), None))
            for step in steps:
                step_began = time.monotonic()
                print(f"{step.__name__.replace('_', ' '):16} ", end="", flush=True)
                result = step(check)
                print(f"ok {time.monotonic() - step_began:4.0f} s  {result}", flush=True)
        except Refused as refused:
            sys.exit(f"REFUSED\n{refused}")
    print(
        f"This commit can go out as {check.version} ({time.monotonic() - began:.0f} s). Nothing was uploaded."
    )


if __name__ == "__main__":
    main()

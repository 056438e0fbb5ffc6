"""Is what is installed what was locked? Compares environments with their files in requirements/.

    .ci/locked.py .venv

CI asks after it has made its environment. ``make test`` does not: people install what they work with.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Of each environment, below the first one: the files that list its packages.
FILES = {".": ("tests.txt", "no-deps.txt"), "mlflow": ("mlflow.txt",), "protoc": ("protoc.txt",)}
#: This package itself, and what makes environments.
BESIDE = {"tokenloom", "pip"}
#: Run by each environment's own Python: its packages, and the lines whose markers hold there.
LIST = """
import importlib.metadata, json, re, sys, sysconfig
sys.path.append(sys.argv[1])
from packaging.requirements import Requirement
lines = [Requirement(line) for line in sys.stdin.read().splitlines() if line and not line.startswith("#")]
locked = {line.name: str(line.specifier)[2:] for line in lines if line.marker is None or line.marker.evaluate()}
found = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
print(json.dumps([locked, {each.metadata["Name"]: each.version for each in found}]))
"""


def differences(environment: Path, packaging: Path, files: tuple[str, ...]) -> list[str]:
    """A line for each package that is missing, not locked, or of another version."""
    text = "".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in files)
    lines = "\n".join(line.split("#")[0].strip() for line in text.splitlines())
    command = [environment / "bin" / "python", "-c", LIST, packaging]
    locked, found = json.loads(subprocess.check_output(command, input=lines, text=True))
    locked = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in locked.items()}
    # The build of torch for CPUs is named by a local version (+cpu), of which a lock says nothing.
    found = {
        re.sub(r"[-_.]+", "-", name).lower(): version.partition("+")[0]
        for name, version in found.items()
    }
    return [
        f"{name}: locked {locked.get(name, 'nowhere')}, installed {found.get(name, 'not at all')}"
        for name in sorted((locked.keys() | found.keys()) - BESIDE)
        if locked.get(name) != found.get(name)
    ]


def main() -> None:
    top = Path(sys.argv[1])
    wrong = 0
    packaging = next(top.glob("lib/python*/site-packages"))
    for below, files in FILES.items():
        if (environment := top / below).exists():
            lines = differences(environment, packaging, files)
            print(
                f"{environment}: {', '.join(files)}: {'as locked' if not lines else f'{len(lines)} packages differ'}"
            )
            print(*(f"    {line}" for line in lines), sep="\n", end="\n" if lines else "")
            wrong += len(lines)
    if wrong:
        sys.exit(
            "another package than the lock's would be tested: run make lock, look at its difference, and commit it"
        )


if __name__ == "__main__":
    main()

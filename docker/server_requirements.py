"""Prints what the server needs and nothing more: the base dependencies without torch, the server extra, what draws
plans, and what reads from the Hub and from object stores.

The base dependencies are the client's, so they name torch; the server never imports it, and an image
without it is several gigabytes smaller. The list stands in pyproject.toml only, and is read from there.

    python docker/server_requirements.py | pip install -c constraints.txt -r /dev/stdin
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

CLIENT_ONLY = {"torch"}
#: What an image has beside the server itself: whoever runs it cannot add to it.
EXTRAS = ("server", "plot", "hf", "s3")


def server_requirements(pyproject: Path) -> list[str]:
    """The requirements of a server installation, as pyproject.toml writes them."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    base = project["dependencies"]
    left_out = {name for name in map(_name, base) if name in CLIENT_ONLY}
    if left_out != CLIENT_ONLY:
        raise SystemExit(f"{pyproject}: expected {sorted(CLIENT_ONLY)} in dependencies, found {sorted(left_out)}")
    extras = project["optional-dependencies"]
    return [line for line in base if _name(line) not in CLIENT_ONLY] + [
        line for extra in EXTRAS for line in extras[extra]
    ]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    print("\n".join(server_requirements(Path(__file__).resolve().parent.parent / "pyproject.toml")))

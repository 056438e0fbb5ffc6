"""An environment for each peer: their dependencies contradict each other's, and ours.

All have the same torch, the CPU build that the project pins; the rest is what pip finds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.corpora import CACHE
from benchmarks.results import ROOT

FOLDER = CACHE / "peers" / "environments"
#: What each environment is made of, beside torch and numpy.
PACKAGES = {
    "huggingface": ("datasets", "torchdata", "tokenizers", "pyarrow"),
    "litdata": ("litdata", "pyarrow"),
    "grain": ("grain", "tokenizers", "pyarrow"),
    "tensorflow": ("tensorflow-cpu", "tokenizers", "pyarrow"),
    "mosaic": ("mosaicml-streaming", "pyarrow"),
    "energon": ("megatron-energon", "pyarrow"),
    # It imports aiohttp and pydantic, and asks for neither.
    "ray": ("ray[data]", "aiohttp", "pydantic", "tokenizers", "pyarrow"),
}
#: This project's own, which is there.
OWN = "tokenloom"
INSTALL_TIMEOUT_S = 900.0


class InstallError(Exception):
    """A peer does not install here; the message is pip's last word."""


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there. Raises ``InstallError``."""
    if name == OWN:
        return Path(sys.executable)
    folder = FOLDER / name
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    if not done.exists():
        torch = next(
            line
            for line in (ROOT / "constraints.txt").read_text().splitlines()
            if line.startswith("torch==")
        )
        constraints = FOLDER / "constraints.txt"
        constraints.parent.mkdir(parents=True, exist_ok=True)
        constraints.write_text(f"{torch}\n")
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(constraints),
        ]
        # torch first and alone, so that no other package's range can pull a CUDA build in.
        _run([*pip, "torch", "numpy"])
        _run([*pip, *PACKAGES[name]])
        done.write_text(_run([str(python), "-m", "pip", "freeze", "--disable-pip-version-check"]))
    return python


def versions_of(name: str) -> dict[str, str]:
    """The versions that decide: the peer's own packages', torch's and numpy's. Of this project's own every result
    has them."""
    if name == OWN:
        return {}
    wanted = {package.partition("[")[0] for package in (*PACKAGES[name], "torch", "numpy")}
    lines = (FOLDER / name / "installed.txt").read_text().splitlines()
    found = (line.partition("==") for line in lines if "==" in line)
    return {
        package.replace("_", "-"): version
        for package, _, version in found
        if package.replace("_", "-") in wanted
    }


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise InstallError(f"not installed within {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InstallError(
            next((line for line in lines if "ERROR" in line), lines[-1] if lines else "no message")
        )
    return done.stdout

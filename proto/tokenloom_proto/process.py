"""Processes as client and server name them: one among all that there are and were, and whether it is gone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

#: No process of an honest client has a longer name.
MAX_LENGTH = 1024


def identity() -> str:
    """This process: host, process id and, on Linux, when it started (in clock ticks since the machine did), for ids
    repeat; then the boot and the PID namespace in which that id means something."""
    name = f"{socket.gethostname()}:{os.getpid()}"
    try:
        return f"{name}:{_stat(os.getpid())[19]} {_kernel()}"
    except OSError:
        return name


def is_gone(process: str) -> bool:
    """Whether a process, as ``identity`` names it, is provably gone: of the boot and PID namespace of who asks, where
    its id is nobody's, a zombie's, or of a process that started at another time. What cannot be seen is alive."""
    name, _, kernel = process.partition(" ")
    try:
        if kernel != _kernel():
            return False
        _, number, started = name.rsplit(":", 2)
        os.kill(int(number), 0)
        stat = _stat(int(number))
        return stat[0] in "ZX" or stat[19] != started
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False


def _kernel() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _stat(number: int) -> list[str]:
    """The fields of a process from its state on; its name, before that, may end within a character."""
    return (
        Path(f"/proc/{number}/stat")
        .read_text(encoding="utf-8", errors="replace")
        .rpartition(")")[2]
        .split()
    )

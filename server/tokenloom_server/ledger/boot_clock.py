"""The clock of a ledger that all its servers open on one machine: leases must not move with the wall clock.

Since the machine's start its processes share a monotonic clock, which nobody sets (those of a container may have one of
their own, by a time namespace). The first of them notes in the ledger what Unix time it had when that clock began, and
all reckon from there; after another start the wall clock says so anew.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


def boot_id() -> str:
    """Equal for all processes of a machine until it starts anew; empty where the system does not say (it is Linux that
    does, and its ``time.monotonic`` that all processes share)."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def boot_clock(connection: sqlite3.Connection) -> Callable[[], float]:
    """Unix time in seconds, equal for all who have this ledger open since the machine's start."""
    boot = boot_id()
    if not boot:
        return time.time
    clock = f"{boot} {_TIME_NAMESPACE.readlink()}" if _TIME_NAMESPACE.is_symlink() else boot
    connection.execute("DELETE FROM boots WHERE id NOT LIKE ?", (f"{boot}%",))
    began = time.time() - time.monotonic()
    connection.execute("INSERT OR IGNORE INTO boots (id, unix_s) VALUES (?, ?)", (clock, began))
    (unix_s,) = connection.execute("SELECT unix_s FROM boots WHERE id = ?", (clock,)).fetchone()
    return lambda: float(unix_s) + time.monotonic()

"""The clock of a ledger that all its servers open on one machine: leases must not move with the wall clock.

Since the machine's start its processes share a monotonic clock, which nobody sets. The first of them notes in the
ledger what Unix time it had when that clock began, and all reckon from there; after another start the wall clock says
so anew.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
    connection.execute("DELETE FROM boots WHERE id != ?", (boot,))
    connection.execute("INSERT OR IGNORE INTO boots (id, unix_s) VALUES (?, ?)", (boot, time.time() - time.monotonic()))
    (unix_s,) = connection.execute("SELECT unix_s FROM boots").fetchone()
    return lambda: float(unix_s) + time.monotonic()

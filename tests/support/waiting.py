"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(happened: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Until it has happened; fails with ``what`` did not. A machine at a load of ten keeps the limit."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds:g} s"
        time.sleep(0.02)

"""Progress over many files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def reported(
    work: Callable[[_In], _Out], report: Callable[[int], None], interval_s: float
) -> Callable[[_In], _Out]:
    """The same work, to be done for many files in threads: ``report`` gets how many are done by now, after so many
    seconds and again after each further."""
    lock, done, next_report_s = threading.Lock(), 0, time.monotonic() + interval_s

    def work_and_report(item: _In) -> _Out:
        nonlocal done, next_report_s
        result = work(item)
        with lock:
            done += 1
            if time.monotonic() >= next_report_s:
                next_report_s += interval_s
                report(done)
        return result

    return work_and_report

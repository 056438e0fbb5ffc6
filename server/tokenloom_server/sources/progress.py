"""Progress over many files, in the log."""

from __future__ import annotations

import threading
import time


class FileProgress:
    """Counts files that are done, and says in which moments that is worth a line in the log. Thread-safe."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._files = 0
        self._next_line_s = time.monotonic() + interval_s
        self._lock = threading.Lock()

    def file_done(self) -> int | None:
        """One more; how many these are by now where a line is due, so many seconds after the last one."""
        with self._lock:
            self._files += 1
            if time.monotonic() < self._next_line_s:
                return None
            self._next_line_s += self._interval_s
            return self._files

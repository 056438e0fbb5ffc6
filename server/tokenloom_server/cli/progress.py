"""How far a long command is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tokenloom_server.cli.common import console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

#: Between two lines.
LINE_S = 10.0


class Progress:
    """Rows (or samples), tokens, MB/s and the time that is left. Thread-safe."""

    def __init__(self, total: int | None, unit: str, *, bytes_are_total: bool = True) -> None:
        """``total``: bytes, or with ``bytes_are_total=False`` units; None where it is not known."""
        self._total = None if total is None else max(1, total)
        self._unit = unit
        self._by_bytes = bytes_are_total
        self._lock = threading.Lock()
        self._units = self._tokens = self._bytes = self._before = 0
        self._began = self._said = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(24), TextColumn("{task.percentage:>3.0f} %  {task.fields[text]}"))
            self._bar = Bar(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=console(stderr=True))
            self._task = self._bar.add_task("", total=self._total, text="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None and self._task is not None:
            if kind is None and self._total is not None:
                # Parts of files were rounded down.
                self._bar.update(self._task, completed=self._total)
            self._bar.stop()
        elif kind is None:
            self._say()

    def kept(self, units: int, tokens: int, size: int) -> None:
        """So much was done before: it counts, but not for the speed."""
        with self._lock:
            self._before += size if self._by_bytes else units
            self._add(units, tokens, size)

    def advance(self, units: int, tokens: int, size: int) -> None:
        """So much more is done."""
        with self._lock:
            self._add(units, tokens, size)

    def _add(self, units: int, tokens: int, size: int) -> None:
        self._units += units
        self._tokens += tokens
        self._bytes += size
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, text=self._text())
        elif time.monotonic() - self._said > LINE_S:
            self._say()

    @property
    def _done(self) -> int:
        return self._bytes if self._by_bytes else self._units

    def _text(self) -> str:
        took = max(time.monotonic() - self._began, 1e-3)
        speed = (self._done - self._before) / took
        rate = f"{speed / 1e6:,.1f} MB/s" if self._by_bytes else f"{speed:,.0f} {self._unit}/s"
        return f"{self._units:,} {self._unit}, {self._tokens:,} tokens, {rate}"

    def _say(self) -> None:
        self._said = time.monotonic()
        fresh, part, eta = self._done - self._before, "", ""
        if self._total is not None:
            part = f"{min(1.0, self._done / self._total):4.0%}  "
            left = (self._total - self._done) / fresh * (self._said - self._began) if fresh else 0.0
            eta = f", {left:,.0f} s left" if left >= 1 else ""
        print(f"{part}{self._text()}{eta}", file=sys.stderr, flush=True)

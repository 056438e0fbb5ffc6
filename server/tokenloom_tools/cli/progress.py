"""How far a long command is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from tokenloom_tools.cli.common import console

#: Between two lines.
LINE_S = 10.0


class Progress:
    """Rows (or samples), tokens, MB/s and the time that is left. Thread-safe."""

    def __init__(self, total: int | None, unit: str, *, bytes_are_total: bool = True) -> None:
        """``total``: bytes, or with ``bytes_are_total=False`` units; None where it is not known. Of shards, which are a
        cluster's, it tells tokens/s instead of MB/s, and how many nodes there are."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._total = None if total is None else max(1, total)
        self._unit = unit
        self._by_bytes = bytes_are_total
        self._lock = threading.Lock()
        self._units = self._tokens = self._bytes = self._before = self._tokens_before = (
            self._nodes
        ) = 0
        self._began = self._printed = time.monotonic()
        self._bar = Bar(
            BarColumn(24),
            TextColumn("{task.description}"),
            console=console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=self._total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._total is not None:
            # Parts of files were rounded down.
            self._total = max(1, self._done)
            self._bar.update(self._task, completed=1, total=1, description=self._text())
        if not self._bar.disable:
            self._bar.stop()
        elif kind is None:
            self._print()

    def kept(self, units: int, tokens: int, size: int) -> None:
        """So much was done before: it counts, but not for the speed. Of a cluster, rows that are one shard."""
        units = 1 if self._unit == "shards" else units
        with self._lock:
            self._before += size if self._by_bytes else units
            self._tokens_before += tokens
            self._add(units, tokens, size)

    def on_nodes(self, count: int) -> None:
        """So many nodes of a cluster are at work."""
        self._nodes = count

    def advance(self, units: int, tokens: int, size: int) -> None:
        """So much more is done."""
        with self._lock:
            self._add(units, tokens, size)

    def _add(self, units: int, tokens: int, size: int) -> None:
        self._units += units
        self._tokens += tokens
        self._bytes += size
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._done, description=self._text())
        elif time.monotonic() - self._printed > LINE_S:
            self._print()

    @property
    def _done(self) -> int:
        return self._bytes if self._by_bytes else self._units

    def _text(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3)
        speed = (self._done - self._before) / seconds
        rate = f"{speed / 1e6:,.1f} MB/s" if self._by_bytes else f"{speed:,.0f} {self._unit}/s"
        if self._unit == "shards":
            tokens_speed = (self._tokens - self._tokens_before) / seconds
            rate = f"{tokens_speed:,.0f} tokens/s on {self._nodes} node{'s' * (self._nodes != 1)}"
        tokens = f"{self._tokens:,} tokens, " * (self._unit != "files")
        text = f"{self._units:,} {self._unit}, {tokens}{rate}"
        if self._total is None:
            return text
        left_s = (self._total - self._done) / speed if speed else 0.0
        return f"{min(1.0, self._done / self._total):4.0%}  {text}" + (
            f", {left_s:,.0f} s left" if left_s >= 1 else ""
        )

    def _print(self) -> None:
        self._printed = time.monotonic()
        print(self._text(), file=sys.stderr, flush=True)

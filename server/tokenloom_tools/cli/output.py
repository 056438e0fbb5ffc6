"""What commands print and log, how far a long one is, and how an error ends it."""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer
from tokenloom_server.core.control_characters import escaped
from tokenloom_server.errors import TokenloomError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console(*, stderr: bool = False) -> Console:
    """Where a command prints."""
    # Imports of rich stand in functions: a server needs none of it, and somebody waits for its start.
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escaped(text, lines=True), **options)

    # Names come from mixture files: nothing in them is markup or an emoji code, and no number is coloured.
    return PlainConsole(markup=False, emoji=False, highlight=False, stderr=stderr)


def say(text: str) -> None:
    """Prints a line of prose, in which paths and specs stay in one piece."""
    console().print(text, soft_wrap=True)


def fail(error: TokenloomError) -> NoReturn:
    """Ends the command with an error's name and message."""
    if logs_json():
        logging.getLogger(__name__).error("%s: %s", error.name, error)
        raise typer.Exit(2)
    err = console(stderr=True)
    err.print(f"{error.name}: ", style="bold red", end="")
    err.print(str(error), soft_wrap=True)
    raise typer.Exit(2)


def print_document(text: str) -> None:
    """Prints YAML, JSON or Markdown as it is, but for control characters."""
    print(escaped(text, lines=True).removesuffix("\n"))


def print_notes(out: Console, notes: Iterable[tuple[bool, str]]) -> None:
    """Prints lines, each with whether it is a warning."""
    for is_warning, note in notes:
        out.print(
            f"warning: {note}" if is_warning else note,
            style="yellow" if is_warning else None,
            soft_wrap=True,
        )


def print_json(document: object) -> None:
    """Prints a document on one line."""
    print_document(json.dumps(document, ensure_ascii=False))


class LineFormatter(logging.Formatter):
    """A record is one line, whatever names and texts it quotes; a traceback after it has lines of its own. Times are
    ISO 8601, in UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return (
            datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return escaped(super().formatException(ei), lines=True)


class JsonFormatter(LineFormatter):
    """A record is one JSON object: time, level, logger, run and rank where they are known, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        document |= _run_and_rank(record) | {"message": record.getMessage()}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


#: Of these loggers of the service, a message that begins with ``%s: `` begins with the run's name.
RUN_LOGS = (
    "run.",
    "replay.",
    "api.service",
    "api.grpc.servicer",
    "order.builder",
)
#: How the threads of a run are named.
_RUN_THREAD = re.compile(
    r"(?P<run>.+)-(?:rank-(?P<rank>\d+)-progress|producer|committer|lease|streams|files|recorder|revise|"
    r"(?:ahead|open|peeks|evaluations)_\d+)"
)


def _run_and_rank(record: logging.LogRecord) -> dict[str, Any]:
    thread = _RUN_THREAD.fullmatch(record.threadName or "")
    known: dict[str, Any] = {"run": thread["run"]} if thread else {}
    if thread and thread["rank"]:
        known["rank"] = int(thread["rank"])
    of_a_run = record.name.removeprefix("tokenloom_server.").startswith(RUN_LOGS)
    if of_a_run and record.args and str(record.msg).startswith("%s: "):
        known["run"] = str(record.args[0])  # type: ignore[index]  # a message with %s has a tuple
    return known


class LogFormat(enum.StrEnum):
    """How lines of the log look."""

    TEXT = "text"
    JSON = "json"


def set_up_logging(level: str, log_format: LogFormat = LogFormat.TEXT) -> None:
    """Logs go to standard error, from a level on. Raises ``typer.BadParameter`` if there is none of this name."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(
            f"{level!r}; expected debug, info, warning or error", param_hint="--log-level"
        )
    # Plain lines, never wrapped: logs are read with grep as often as by eye.
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    if log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter())
        # What others write there, too: Python's warnings and faults, and nothing of gRPC's native part.
        logging.captureWarnings(True)
        sys.excepthook = lambda *fault: logging.critical("the process ends", exc_info=fault)
        threading.excepthook = lambda fault: logging.error(
            "a thread ended", exc_info=fault.exc_value
        )
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(level=number, handlers=[handler])


def logs_json() -> bool:
    """Whether standard error is for JSON alone."""
    return any(
        isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers
    )


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

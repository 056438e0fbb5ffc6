"""What is printed and logged, and how an error ends a command."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, NoReturn

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
    err = console(stderr=True)
    err.print(f"{error.name}: ", style="bold red", end="")
    err.print(str(error), soft_wrap=True)
    raise typer.Exit(2)


def print_document(text: str) -> None:
    """Prints YAML, JSON or Markdown as it is, but for control characters."""
    print(escaped(text, lines=True).removesuffix("\n"))


def print_json(document: object) -> None:
    """Prints a document on one line."""
    print_document(json.dumps(document, ensure_ascii=False))


class LineFormatter(logging.Formatter):
    """A record is one line, whatever names and texts it quotes; a traceback after it has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return escaped(super().formatException(ei), lines=True)


def set_up_logging(level: str) -> None:
    """Logs go to standard error, from a level on. Raises ``typer.BadParameter`` if there is none of this name."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"{level!r}; expected debug, info, warning or error", param_hint="--log-level")
    # Plain lines, never wrapped: logs are read with grep as often as by eye.
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=number, handlers=[handler])

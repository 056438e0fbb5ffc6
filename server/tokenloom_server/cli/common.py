"""What is printed and logged, and how an error ends a command."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, NoReturn

import typer

from tokenloom_server.errors import TokenloomError

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """Where a command prints."""
    # Imports of rich stand in functions: a server needs none of it, and somebody waits for its start.
    from rich.console import Console

    # Names come from mixture files: nothing in them is markup or an emoji code, and no number is coloured.
    return Console(markup=False, emoji=False, highlight=False, stderr=stderr)


def say(text: str) -> None:
    """Prints a line of prose, in which paths and specs stay in one piece."""
    console().print(text, soft_wrap=True)


def fail(error: TokenloomError) -> NoReturn:
    """Ends the command with an error's name and message."""
    err = console(stderr=True)
    err.print(f"{error.name}: ", style="bold red", end="")
    err.print(str(error), soft_wrap=True)
    raise typer.Exit(2)


def print_json(document: object) -> None:
    """Prints a document on one line."""
    print(json.dumps(document, ensure_ascii=False))


def set_up_logging(level: str) -> None:
    """Logs go to standard error, from a level on. Raises ``typer.BadParameter`` if there is none of this name."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"{level!r}; expected debug, info, warning or error", param_hint="--log-level")
    # Plain lines, never wrapped: logs are read with grep as often as by eye.
    logging.basicConfig(level=number, format="%(asctime)s %(levelname)-7s %(message)s")

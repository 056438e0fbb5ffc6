"""What the commands share: how a server is reached, what is printed and logged, how an error ends a command."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tokenloom_server.errors import TokenloomError

if TYPE_CHECKING:
    from rich.console import Console

Url = Annotated[str, typer.Argument(help="The server's REST address, such as http://127.0.0.1:8080", metavar="URL")]
RunName = Annotated[str | None, typer.Option(help="The run; needed where the server has several.", show_default=False)]
#: What those who only look may show a server.
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the server's token; mode 0600. Without it: TOKENLOOM_READ_TOKEN or TOKENLOOM_TOKEN.",
        show_default=False,
    ),
]
#: What those who change something have to.
ControlTokenFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the server's control token; mode 0600. Without it: TOKENLOOM_TOKEN.", show_default=False
    ),
]
TlsCa = Annotated[Path | None, typer.Option(help="The CA to trust, PEM; or TOKENLOOM_TLS_CA.", show_default=False)]
TlsCert = Annotated[
    Path | None, typer.Option(help="A certificate to show, PEM (mTLS); or TOKENLOOM_TLS_CERT.", show_default=False)
]
TlsKey = Annotated[Path | None, typer.Option(help="Its key, PEM; or TOKENLOOM_TLS_KEY.", show_default=False)]


def console(*, stderr: bool = False) -> Console:
    """Where a command prints."""
    # Imports of rich stand in functions: a server needs none of it, and somebody waits for its start.
    from rich.console import Console

    # Names come from mixture files: nothing in them is markup or an emoji code.
    return Console(markup=False, emoji=False, stderr=stderr)


def fail(error: TokenloomError) -> NoReturn:
    """Ends the command with an error's name and message."""
    err = console(stderr=True)
    err.print(f"{error.name}: ", style="bold red", end="")
    err.print(str(error), highlight=False, soft_wrap=True)
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

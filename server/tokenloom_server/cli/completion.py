"""What a shell completes beside commands and options: names that the server at the address of the line knows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tokenloom_server.errors import TokenloomError

if TYPE_CHECKING:
    from tokenloom_server.tools.remote import Remote


def complete_run(context: typer.Context) -> list[str]:
    """The runs of the server."""
    return _asked(context, lambda server: server.runs())


def complete_child(context: typer.Context) -> list[str]:
    """The aliases of the run's sources."""
    run = context.params.get("run")
    return _asked(context, lambda server: [source.alias for each in server.stats(run) for source in each.sources])


def _asked(context: typer.Context, ask: Callable[[Remote], list[str]]) -> list[str]:
    """What the server says; nothing where it does not answer, for somebody is typing."""
    from tokenloom_proto.credentials import TlsFiles

    from tokenloom_server.tools.remote import Remote

    # Where an option's value is completed, the arguments are not taken apart yet.
    options, arguments = context.params, [*context.args, ""]
    files = TlsFiles(options.get("tls_ca"), options.get("tls_cert"), options.get("tls_key"))
    token_file: Path | None = options.get("token_file")
    try:
        return ask(Remote(options.get("url") or arguments[0], os.environ, token_file=token_file, files=files))
    except TokenloomError:
        return []


def join_words() -> None:
    """Puts together in the environment what bash hands over of a word with colons, such as an address: three words."""
    words, cursor = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD") or 0)
    for i in range(len(words) - 2, 0, -1):
        if words[i] == ":":
            words[i - 1 : i + 2] = ["".join(words[i - 1 : i + 2])]
            cursor -= 2 * (cursor > i)
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(cursor)}

"""The commands and their options, by what ``--help`` says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenloom_tools.cli.app import app
from typer.main import get_command

from docsite.reference.markdown import entries, prose, table

#: The page about what a command is for.
GUIDES = {
    "checkpoint": "checkpoint-files.md",
    "demo": "quick-start.md",
    "examples": "install.md",
    "fork": "forks.md",
    "import": "from-mosaic.md",
    "init": "mixture-file.md#from-a-folder",
    "ledger": "operations.md#backup",
    "mixture": "revisions.md",
    "peek": "inspecting.md",
    "plan": "plans.md",
    "prepare": "prepare.md",
    "restore": "checkpoints.md#restore-to-an-earlier-sample",
    "runs": "many-runs.md#add-and-remove-runs",
    "schema": "mixture-file.md#in-an-editor",
    "serve": "running.md",
    "stats": "running.md#look-at-a-run",
    "token": "access.md",
    "validate": "mixture-file.md",
    "verify": "receipts.md",
}


def overview() -> str:
    """A list of the commands, each with a link to its page."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    return entries(
        (f"[`tokenloom {name}`]({GUIDES[name]})", "", _plain(commands[name].help.split("\n\n")[0]))
        for name in commands
    )


def every_option() -> str:
    """A section for each command, with its usage, arguments and options."""
    return "\n".join(
        _section(path, command) for path, command in _below("tokenloom", get_command(app))
    )


def _below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands that do something, as they are typed."""
    group = getattr(command, "commands", {})
    if not group or command.invoke_without_command:
        yield path, command
    for name, below in group.items():
        yield from _below(f"{path} {name}", below)


def _section(path: str, command: Any) -> str:
    context = command.make_context(path, [], resilient_parsing=True)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            panel = (
                getattr(parameter, "rich_help_panel", None)
                or f"{parameter.param_type_name}s".capitalize()
            )
            panels.setdefault(panel, []).append((f"`{record[0]}`", _plain(record[1])))
    tables = (table((panel, "meaning"), rows) for panel, rows in panels.items())
    return "\n".join((f"## {path}\n", f"    {usage}\n", f"{_plain(command.help)}\n", *tables))


def _plain(text: str) -> str:
    """Help as Markdown: without the marks by which it is coloured, and with its names as code."""
    bare = re.sub(r"\\\[", "[", re.sub(r"\[/?(?:bold|cyan|dim)\]", "", text))
    # Two brackets in a row are a link in Markdown.
    bare = re.sub(r"\]\s+\[", "], [", bare)
    return re.sub(r"(?<![\w`])(--[a-z][\w-]*|TOKENLOOM_\w+)", r"`\1`", prose(bare)).replace(
        "<", "&lt;"
    )

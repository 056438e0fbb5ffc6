"""``--help`` says all that the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from rich.text import Text
from support.capabilities import commands
from tokenloom_tools.cli.app import app
from typer.main import get_command
from typer.testing import CliRunner


def help_texts(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """(command, text) of all help of a command and those below it."""
    yield path, command.help or ""
    for parameter in command.params:
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from help_texts(below, f"{path} {name}")


@pytest.mark.parametrize(("where", "text"), [*help_texts(get_command(app), "tokenloom")])
def test_no_bracket_is_taken_for_markup(where: str, text: str) -> None:
    brackets = re.findall(r"\[[a-z0-9|,]+\]", text.replace("\\[", "["))
    shown = Text.from_markup(text).plain
    assert [bracket for bracket in brackets if bracket not in shown] == [], where


@pytest.mark.parametrize("path", [path for path, _ in commands()])
def test_every_option_is_readable_at_80_columns(path: str) -> None:
    asked = [*path.split()[1:], "--help"]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "80", "NO_COLOR": "1"}).output
    assert all(
        name in shown
        for option in dict(commands())[path].params
        if not getattr(option, "hidden", False)
        for name in option.opts
        if name.startswith("--")
    )
    assert len(shown.splitlines()) < 160


def test_help_names_the_extra_to_install() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    assert "pip install 'tokenloom[plot]'" in shown

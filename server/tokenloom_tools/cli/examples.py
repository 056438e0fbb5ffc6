"""``tokenloom examples``: the repository's scripts and mixture files, for those who have installed Tokenloom alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from tokenloom_server.errors import ConfigError

import tokenloom_tools

_PACKAGE = Path(tokenloom_tools.__file__).parent
#: In the wheel, and in a checkout.
_PLACES = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")


def examples(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")] = Path(
        "examples"
    ),
) -> None:
    """Copy the example of each framework, and the mixture files that they train on, into a folder."""
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not exist yet")
    source = next(place for place in _PLACES if place.is_dir())
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        typer.echo(path)

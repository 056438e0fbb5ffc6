"""``tokenloom demo``: the whole job on this machine. ``tokenloom examples``: the repository's scripts and mixture
files, for those who have installed Tokenloom alone."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from tokenloom_server.errors import ConfigError

import tokenloom_tools


def demo(
    folder: Annotated[Path, typer.Option(help="Where corpora, logs and checkpoints go.")] = Path(
        "tokenloom-demo"
    ),
    steps: Annotated[
        int, typer.Option(min=8, help="Training steps of the first, two-rank part's plan.")
    ] = 48,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the server and its page up at the end, until Ctrl-C."),
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Something to watch instead: opens the page, trains slowly, revises the mixture, kills and resumes; "
            "stays up until Ctrl-C.",
        ),
    ] = False,
) -> None:
    """Run the whole job on text that is on this machine: train, kill everything, resume elsewhere, prove it."""
    if find_spec("torch") is None:
        raise ConfigError(
            "the demonstration trains, and torch is not installed: pip install 'tokenloom[server,torch]'"
        )
    from tokenloom_tools.demo.main import run_demo

    if live:
        from tokenloom_tools.demo.main import LiveDemo

        raise typer.Exit(run_demo(folder, steps=steps, keep=True, act=LiveDemo))
    raise typer.Exit(run_demo(folder, steps=steps, keep=keep))


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

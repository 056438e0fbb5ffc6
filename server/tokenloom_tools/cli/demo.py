"""``tokenloom demo``: the whole job on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from tokenloom_server.errors import ConfigError


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
        from tokenloom_tools.demo.live import LiveDemo

        raise typer.Exit(run_demo(folder, steps=steps, keep=True, act=LiveDemo))
    raise typer.Exit(run_demo(folder, steps=steps, keep=keep))

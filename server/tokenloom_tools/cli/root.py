"""The command line without its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_tools.cli.common import console


class App(typer.Typer):
    """``tokenloom``, to which commands are added."""

    def __init__(self) -> None:
        super().__init__(
            name="tokenloom",
            help="A data loader for language-model training: one server, one canonical order, exact elastic resume.",
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        self.callback()(_root)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console().print(f"tokenloom {version('tokenloom')}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass

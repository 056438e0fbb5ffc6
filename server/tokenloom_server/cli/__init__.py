"""The command line: a module per command, each of which wires together what its command needs."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_server.cli import (
    checkpoint,
    demo,
    export,
    fork,
    mixture,
    peek,
    plan,
    prepare,
    report,
    restore,
    serve,
    stats,
    trace,
    validate,
    verify,
)
from tokenloom_server.cli.common import console

app = typer.Typer(
    name="tokenloom",
    help="A data loader for language-model training: one server, one canonical order, exact elastic resume.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of --help. An app with a name is a group of commands; the commands of the others stand on their own.
app.add_typer(serve.app)
app.add_typer(validate.app)
app.add_typer(plan.app)
app.add_typer(prepare.app)
app.add_typer(stats.app)
app.add_typer(verify.app)
app.add_typer(report.app)
app.add_typer(peek.app)
app.add_typer(trace.app)
app.add_typer(export.app)
app.add_typer(restore.app)
app.add_typer(fork.app)
app.add_typer(demo.app)
app.add_typer(mixture.app)
app.add_typer(checkpoint.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console().print(f"tokenloom {version('tokenloom')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass

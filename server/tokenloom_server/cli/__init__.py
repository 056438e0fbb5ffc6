"""The command line: a module per command or group of commands, each of which wires together what it needs."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_server.cli import (
    checkpoint,
    demo,
    export,
    foreign,
    fork,
    init,
    mixture,
    peek,
    plan,
    prepare,
    report,
    restore,
    schema,
    serve,
    stats,
    token,
    trace,
    validate,
    verify,
)
from tokenloom_server.cli.command import add_command
from tokenloom_server.cli.common import console

app = typer.Typer(
    name="tokenloom",
    help="A data loader for language-model training: one server, one canonical order, exact elastic resume.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of --help; the groups of commands come last.
add_command(app, serve.serve)
add_command(app, init.init)
add_command(app, validate.validate)
add_command(app, plan.plan)
add_command(app, prepare.prepare)
add_command(app, stats.stats)
add_command(app, verify.verify)
add_command(app, report.report)
add_command(app, peek.peek)
add_command(app, trace.trace)
add_command(app, export.export)
add_command(app, restore.restore)
add_command(app, fork.fork)
add_command(app, foreign.import_seen, "import")
add_command(app, token.token)
add_command(app, schema.schema)
add_command(app, demo.demo)
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

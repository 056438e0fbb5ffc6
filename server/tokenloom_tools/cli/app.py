"""The command line with all its commands."""

from __future__ import annotations

from tokenloom_tools.cli import (
    checkpoint,
    demo,
    examples,
    foreign,
    fork,
    init,
    ledger,
    mixture,
    peek,
    plan,
    prepare,
    restore,
    runs,
    schema,
    serve,
    stats,
    token,
    validate,
    verify,
)
from tokenloom_tools.cli.command import add_command
from tokenloom_tools.cli.config import SETTINGS
from tokenloom_tools.cli.root import App

app = App()
# In the order of --help; the groups of commands come last.
add_command(app, serve.serve, **SETTINGS)
add_command(app, init.init)
add_command(app, validate.validate)
add_command(app, plan.plan)
add_command(app, prepare.prepare)
add_command(app, stats.stats)
add_command(app, verify.verify)
add_command(app, peek.peek)
add_command(app, restore.restore)
add_command(app, fork.fork)
add_command(app, runs.runs)
add_command(app, checkpoint.checkpoint)
add_command(app, foreign.import_seen, "import")
add_command(app, schema.schema)
add_command(app, demo.demo)
add_command(app, examples.examples)
app.add_typer(mixture.app)
app.add_typer(ledger.app)
app.add_typer(token.app)

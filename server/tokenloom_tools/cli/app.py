"""The command line with all its commands."""

from __future__ import annotations

from tokenloom_tools.cli import (
    checkpoint,
    demo,
    init,
    ledger,
    mixture,
    peek,
    plan,
    prepare,
    runs,
    serve,
    token,
    validate,
)
from tokenloom_tools.cli.command import App, add_command

app = App()
# In the order of --help; the groups of commands come last.
add_command(app, serve.serve, **serve.SETTINGS)
add_command(app, init.init)
add_command(app, validate.validate)
add_command(app, plan.plan)
add_command(app, prepare.prepare)
add_command(app, runs.stats)
add_command(app, runs.verify)
add_command(app, peek.peek)
add_command(app, runs.restore)
add_command(app, runs.fork)
add_command(app, runs.runs)
add_command(app, checkpoint.checkpoint)
add_command(app, checkpoint.import_seen, "import")
add_command(app, init.schema)
add_command(app, demo.demo)
add_command(app, demo.examples)
app.add_typer(mixture.app)
app.add_typer(ledger.app)
app.add_typer(token.app)

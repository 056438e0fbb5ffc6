"""``tokenloom mixture``: a run's mixture, looked at and changed while it trains."""

from __future__ import annotations

import typer

from tokenloom_server.cli.mixture import (
    add,
    append_files,
    apply,
    drop,
    exclude,
    pause,
    set_child,
    show,
    undo,
)

app = typer.Typer(
    name="mixture",
    help="Look at the mixture of a served run, and change it while it trains: no restart, and every restore reproduces "
    "it.",
    no_args_is_help=True,
)
# In the order of --help.
app.add_typer(show.app)
app.add_typer(set_child.app)
app.add_typer(pause.app)
app.add_typer(add.app)
app.add_typer(drop.app)
app.add_typer(apply.app)
app.add_typer(append_files.app)
app.add_typer(exclude.app)
app.add_typer(undo.app)

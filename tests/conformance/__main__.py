"""``python -m tests.conformance CLIENT`` holds a client in any language to the contract; docs/protocol.md says how it
is asked. ``python -m tests.conformance "python -m tests.conformance.adapter"`` checks Tokenloom's own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.conformance.checks import CHECKS
from tests.conformance.client import Broken, Refused
from tests.conformance.world import World

app = typer.Typer(add_completion=False)


@app.command()
def main(
    client: Annotated[
        str, typer.Argument(help="the command that starts the client, with its arguments")
    ],
    only: Annotated[
        list[str] | None, typer.Option(help=f"one check, repeatable: {', '.join(CHECKS)}")
    ] = None,
) -> None:
    """Checks a client, and prints a line for each check. Exits with 1 where one failed."""
    unknown = set(only or ()) - set(CHECKS)
    if unknown:
        raise typer.BadParameter(
            f"there is no check {sorted(unknown)}; expected some of {', '.join(CHECKS)}"
        )
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            with world.with_client(client):
                failed = sum(
                    not _passes(name, world, console) for name in CHECKS if not only or name in only
                )
        finally:
            world.close()
    console.print(f"{failed} checks failed" if failed else "the client conforms")
    raise typer.Exit(1 if failed else 0)


def _passes(name: str, world: World, console: Console) -> bool:
    """Makes a check, and prints how it went."""
    about = (CHECKS[name].__doc__ or "").strip()
    try:
        CHECKS[name](world)
    except (Broken, Refused) as error:
        console.print(f"[red]FAIL[/]  {name}: {about}\n      {error}", soft_wrap=True)
        return False
    console.print(f"[green]ok[/]    {name}: {about}", soft_wrap=True)
    return True


if __name__ == "__main__":
    app()

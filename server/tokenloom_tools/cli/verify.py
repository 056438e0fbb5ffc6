"""``tokenloom verify``: whether two runs had the same data."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom_tools.cli.common import console, print_json
from tokenloom_tools.cli.options import ReadAccess


def verify(
    a: Annotated[
        str,
        typer.Argument(
            help="A server's REST address, with /RUN where it has several, or a checkpoint, a file or folder.",
            metavar="A",
        ),
    ],
    b: Annotated[str, typer.Argument(help="The other one.", metavar="B")],
    run_a: Annotated[str | None, typer.Option(help="The run of A, where A is a server.")] = None,
    run_b: Annotated[str | None, typer.Option(help="The run of B, where B is a server.")] = None,
    inside_a: Annotated[
        str | None, typer.Option(help="Where in the checkpoint A the state lies.")
    ] = None,
    inside_b: Annotated[
        str | None, typer.Option(help="Where in the checkpoint B the state lies.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
    *,
    access: ReadAccess,
) -> None:
    """Prove whether two runs had the same data, on any topology, and up to which sample.

    Compares rolling digests. Where they differ, servers are asked for digests at earlier samples until the first
    sample that differs is found. Exit status: 0 if the data are the same up to the end of the shorter run, 1 if they
    differ, 2 if that is not known.
    """
    from tokenloom_tools.verify.compare import compare
    from tokenloom_tools.verify.digests import open_source
    from tokenloom_tools.verify.text import PROVES, document, explain

    with console(stderr=True).status("comparing"):
        both = (
            open_source(a, run_a, access.connect, inside_a),
            open_source(b, run_b, access.connect, inside_b),
        )
        verdict = compare(*both)
        lines = explain(verdict, *both)
    if as_json:
        print_json(document(verdict, *both))
    else:
        out = console()
        for line in lines:
            out.print(line, soft_wrap=True)
        out.print(PROVES, style="dim")
    raise typer.Exit(verdict.status)

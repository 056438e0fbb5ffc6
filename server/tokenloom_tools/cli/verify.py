"""``tokenloom verify``: which data a run had, and whether two runs had the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from tokenloom_server.errors import ConfigError

from tokenloom_tools.cli.common import console, print_document, print_json
from tokenloom_tools.cli.options import Inside, ReadAccess


def verify(
    a: Annotated[
        str,
        typer.Argument(
            help="A server's address, with /RUN where it has several, or a checkpoint, a file or folder.",
            metavar="A",
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(help="The other one, to compare A with.", metavar="B")
    ] = None,
    inside: Inside = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
    *,
    access: ReadAccess,
) -> None:
    """Prove whether two runs had the same data, and up to which sample; or report which data one run had.

    Of two, compares rolling digests. Where they differ, servers are asked for digests at earlier samples until the
    first sample that differs is found. Exit status: 0 if the data are the same up to the end of the shorter run, 1 if
    they differ, 2 if that is not known.

    Of a served run alone, writes what a model card needs to say about its data, as Markdown: sources, tokens, epochs,
    digests, launches.
    """
    if b is None:
        from tokenloom_tools.reports.model_card import markdown

        if Path(a).exists():
            raise ConfigError(
                f"{a!r} is a checkpoint: name what to compare it with, a server or another checkpoint"
            )
        if inside is not None:
            raise ConfigError("--inside goes with a checkpoint, and so with two to compare")
        server = access.connect(a)
        report = server.report(server.only_run())
        print_json(report.model_dump()) if as_json else print_document(markdown(report))
        return
    from tokenloom_tools.verify import PROVES, compare, document, explain, open_source

    with console(stderr=True).status("comparing"):
        both = (open_source(a, access.connect, inside), open_source(b, access.connect, inside))
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

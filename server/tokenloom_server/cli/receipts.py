"""``tokenloom verify`` and ``tokenloom report``: what data runs had, to prove and to publish."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tokenloom_server.cli.common import TlsCa, TlsCert, TlsKey, TokenFile, Url, console, fail, print_json
from tokenloom_server.errors import TokenloomError

app = typer.Typer()


@app.command()
def verify(
    a: Annotated[
        str,
        typer.Argument(
            help="A server's REST address, with /RUN where it has several, or a snapshot or checkpoint in JSON.",
            metavar="A",
            show_default=False,
        ),
    ],
    b: Annotated[str, typer.Argument(help="The other one.", metavar="B", show_default=False)],
    run_a: Annotated[str | None, typer.Option(help="The run of A, where A is a server.", show_default=False)] = None,
    run_b: Annotated[str | None, typer.Option(help="The run of B, where B is a server.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Prove whether two runs had the same data, on any topology, and up to which sample.

    Compares rolling digests. Where they differ, servers are asked for digests at earlier samples until the first
    sample that differs is found. Exit status: 0 if the data are the same up to the end of the shorter run, 1 if they
    differ, 2 if that cannot be told.
    """
    from tokenloom_server.tools import verify as comparison
    from tokenloom_server.tools import verify_sides
    from tokenloom_server.tools.remote import Remote

    def connect(url: str) -> Remote:
        return Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)

    try:
        with console(stderr=True).status("comparing"):
            both = verify_sides.side(a, run_a, connect), verify_sides.side(b, run_b, connect)
            verdict = comparison.compare(*both)
            lines = comparison.explain(verdict, *both)
    except TokenloomError as error:
        fail(error)
    if as_json:
        print_json(comparison.document(verdict, *both))
    else:
        out = console()
        for line in lines:
            out.print(line, highlight=False, soft_wrap=True)
        out.print(comparison.PROVES, style="dim", highlight=False)
    raise typer.Exit(verdict.status)


@app.command()
def report(
    url: Url,
    run: Annotated[str | None, typer.Option(help="The run, where the server has several.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json/--markdown", help="As JSON, or as Markdown.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Write what a model card needs to say about a run's data: sources, tokens, epochs, digests, launches."""
    from tokenloom_server.reports.model_card import markdown
    from tokenloom_server.tools.remote import Remote

    try:
        remote = Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        found = remote.report(remote.only_run(run))
    except TokenloomError as error:
        fail(error)
    if as_json:
        print_json(found.model_dump())
    else:
        print(markdown(found), end="")

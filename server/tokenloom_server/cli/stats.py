"""``tokenloom stats``: the mix of a running server, in figures."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tokenloom_server.cli.common import TlsCa, TlsCert, TlsKey, TokenFile, Url, console, fail, print_json
from tokenloom_server.errors import TokenloomError

app = typer.Typer()


@app.command()
def stats(
    url: Url,
    run: Annotated[str | None, typer.Option(help="One run; all of the server's if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the documents as JSON, one a line.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the mix of a running server: shares, rows, tokens, epochs, ranks."""
    from rich.table import Table

    from tokenloom_server.tools.remote import Remote

    out = console()
    try:
        remote = Remote(url, os.environ, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        found = remote.stats(run)
    except TokenloomError as error:
        fail(error)
    for document in found:
        if as_json:
            print_json(document.model_dump())
            continue
        out.print(
            f"{document.run}: sample {document.sample_index:,}, {document.total_tokens:,} tokens committed, "
            f"{document.tokens_per_s:,.0f} tokens/s; generation {document.generation}, "
            f"{document.world_size} ranks × {document.batch_size}; ledger {document.ledger.backend}"
        )
        coming = document.next_revision
        if document.revision or coming:
            behind = f"; revision {coming.number} from sample {coming.sample_index:,} on" if coming else ""
            what = f"revision {document.revision}" if document.revision else "the mixture that the run began with"
            out.print(f"in force: {what}{behind} (tokenloom mixture show)")
        headings = ["source", "target", "actual", "recent", "samples", "rows", "tokens", "epoch", "left"]
        reported = document.reported
        if reported is not None:
            headings.insert(4, "loss")
        table = Table()
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "source" else "right")
        for source in document.sources:
            left = "?" if source.remaining_samples is None else f"{source.remaining_samples:,}"
            loss = () if reported is None else ("–" if source.loss is None else f"{source.loss:.4f}",)
            table.add_row(
                source.alias,
                f"{source.target_share:.2%}",
                f"{source.actual_share:.2%}",
                f"{source.window_share:.2%}",
                *loss,
                f"{source.samples:,}",
                f"{source.rows:,}",
                f"{source.tokens:,}",
                f"{source.epoch:.2f}",
                "exhausted" if source.exhausted else left,
            )
        out.print(table)
        if reported is not None:
            overall = "" if reported.loss is None else f", loss {reported.loss:.4f}"
            rate = "" if reported.learning_rate is None else f", learning rate {reported.learning_rate:.2e}"
            out.print(
                f"reported {reported.age_s:.1f} s ago: step {reported.step:,}, sample {reported.sample_index:,}"
                f"{overall}{rate}",
                highlight=False,
            )
        without = [
            f"{source.alias} {source.bad_rows:,} bad, {source.filtered_rows:,} filtered"
            for source in document.sources
            if source.bad_rows or source.filtered_rows
        ]
        if without:
            out.print(f"rows that gave no tokens: {'; '.join(without)}", highlight=False)
        skipped = [source for source in document.sources if source.skipped_samples]
        if skipped:
            named = ", ".join(
                f"{source.alias} {source.skipped_samples:,} samples, {source.skipped_rows:,} rows, "
                f"{source.skipped_tokens:,} tokens"
                for source in skipped
            )
            out.print(f"skipped by restores, and not counted above: {named}", highlight=False)
        for rank in document.ranks:
            heard = "never heard" if rank.last_heard_s is None else f"heard {rank.last_heard_s:.1f} s ago"
            state = "connected" if rank.connected else "away"
            out.print(f"rank {rank.rank}: {state}, at sample {rank.position:,} (lag {rank.lag:,}), {heard}")
        for note in (document.waiting_for and f"waiting for {document.waiting_for}", document.ended, document.error):
            if note:
                out.print(note)

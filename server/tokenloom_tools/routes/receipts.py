"""Which data a run had: its receipt at a sample index, and the report for its model card."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import COUNTER, RunName
from tokenloom_server.api.rest.routes import AppBackend, Routes

from tokenloom_tools.past.receipts import Receipts
from tokenloom_tools.reports.receipt import Receipt, RunReport

ROUTES = Routes()


@ROUTES.add("GET", "/v1/runs/{run}/receipt", Scope.READ, errors=(416, 429, 500), tags=["receipts"])
def read_receipt(
    backend: AppBackend,
    run: RunName,
    sample_index: Annotated[
        int | None, Query(description="The committed one if not given.", examples=[4096], **COUNTER)
    ] = None,
) -> Receipt:
    """Which data a run had up to a sample index.

    The rolling digest at any committed sample index, and what it depends on. Two runs with the same digest at the
    same index had the same samples before it, on any topology. An index that is not at hand is gone forward to,
    from the nearest state in the ledger's journal, in turns with peeks.
    """
    return backend.runs.get(run).companion(Receipts).receipt(sample_index)


@ROUTES.add("GET", "/v1/runs/{run}/report", Scope.READ, errors=(429, 500), tags=["receipts"])
def read_report(backend: AppBackend, run: RunName) -> RunReport:
    """What a model card says about a run's data.

    Per source: files and their digest, tokens, unique tokens, epochs. Tokeniser, seed, digests, launches, versions
    of software.
    """
    return backend.runs.get(run).companion(Receipts).report()

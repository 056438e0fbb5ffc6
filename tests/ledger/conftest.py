"""What tests of one store and of several share: a ledger on it, and the server that leads a run there."""

from __future__ import annotations

import pytest
from support.ledger_server import Server, lead
from support.ledger_stores import LedgerStore
from tokenloom_server.ledger.base import Ledger


@pytest.fixture
def ledger(store: LedgerStore) -> Ledger:
    return store.open()


@pytest.fixture
def server(ledger: Ledger) -> Server:
    """In the first generation of its run."""
    made = lead(ledger)
    made.open(1, 0)
    return made

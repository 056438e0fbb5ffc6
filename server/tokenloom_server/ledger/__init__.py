"""The ledger: where committed state lives."""

"""A ledger, copied, backed up and checked."""

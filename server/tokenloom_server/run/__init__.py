"""One live run: its generation, lease and ledger writes; joins, deliveries, commits, revisions, forks; its past, and
restores to it.

Its ``RunCoordinator`` owns what its threads share, and the lock around it."""

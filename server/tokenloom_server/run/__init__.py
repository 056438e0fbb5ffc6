"""One live run: its generation, lease and ledger writes; joins, deliveries, commits, revisions, forks.

Its ``RunCoordinator`` owns what its threads share, and the lock around it."""

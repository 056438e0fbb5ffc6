"""A run goes from one ledger to another: it is in one of them at any moment, wherever this is interrupted.

1. The lease is taken where the run is: no server leads it, and none can until it is lost or let go.
2. The run is written to the other ledger, which says that it is still elsewhere: nobody can lead it there.
3. The first ledger says that the run is in the other one.
4. The other one no longer says that it is elsewhere.

Until 3. the first one has it, and from then on the other. What was begun and not ended is gone through again.
"""

from __future__ import annotations

from contextlib import suppress

from tokenloom_server.errors import LedgerError, TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Acquire, Import, Move, Release
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.ledger.rules import refuse_elsewhere

from tokenloom_tools.ledger.backup import read_whole

#: Many times what one run takes, seconds. Where it is over meanwhile, and a server has taken the lease, 3. is refused.
LEASE_S = 60.0


def copy_run(source: Ledger, target: Ledger, name: str, stream: str) -> bool:
    """Moves a run; returns whether it was still to be moved. Raises ``LeaseHeld`` where a server leads it, and the
    errors of both ledgers: then the run is where it was, or, after 3., this goes on from there when called again."""
    stored, present = read_whole(source, name, stream).run, target.read_run(name, stream)
    if stored.elsewhere == target.description:
        return _arrive(source, target, stored, present)
    refusal = refuse_elsewhere(name, stored.elsewhere)
    if refusal is not None:
        raise refusal
    of_run = stored.uid, stream
    # Two at once: the one that comes later has the higher epoch, and 3. refuses the other.
    holder, beyond = (
        f"tokenloom ledger copy to {target.description}",
        present.epoch if present is not None else 0,
    )
    epoch = source.execute(Acquire(*of_run, holder, LEASE_S, beyond))
    try:
        contents = read_whole(source, name, stream)
        there = target.execute(Import(*of_run, contents, elsewhere=source.description))
        source.execute(Move(*of_run, epoch, target.description))
    except TokenloomError:
        with suppress(TokenloomError):
            source.execute(Release(*of_run, epoch))
        raise
    target.execute(Move(*of_run, there, ""))
    return True


def _arrive(source: Ledger, target: Ledger, stored: StoredRun, present: StoredRun | None) -> bool:
    """Goes on after 3.; returns whether 4. was still to be done."""
    if present is None or present.uid != stored.uid:
        raise LedgerError(
            f"run {stored.name!r} was moved from {source.description} to {target.description}, which does not have it "
            f"(any more). What it was when it moved can be saved (tokenloom ledger backup) and restored there"
        )
    if present.elsewhere != source.description:
        return False
    target.execute(Move(stored.uid, stored.stream, present.epoch, ""))
    return True

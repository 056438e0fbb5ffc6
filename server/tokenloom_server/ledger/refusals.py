"""What both ledgers refuse, in the same words: what the ledger holds, what the call had, what it means."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import (
    AttemptUsed,
    Fenced,
    LeaseHeld,
    LedgerError,
    LedgerRolledBack,
    NotFound,
    NotLeader,
    OrderMismatch,
)
from tokenloom_server.ledger.base import Commit, Opening, StoredRevision, date_of


def no_such_run(uid: str, stream: str) -> NotFound:
    return NotFound(
        f"The ledger has no run {uid}, stream {stream}: either another ledger was meant (--ledger), or this lost it."
    )


def renamed(uid: str, stream: str, found: str) -> NotLeader:
    return NotLeader(
        f"Run {uid}, stream {stream}, took the uid {found}, for a trainer that brought that run's state: whoever still "
        f"writes as {uid} serves it no longer. Read the run by its name again."
    )


_REMEDY = f"The ledger lost what it had acknowledged, so nothing goes on from it. {LedgerRolledBack.remedy}."


def gone(uid: str, stream: str) -> LedgerRolledBack:
    return LedgerRolledBack(f"Run {uid}, stream {stream}, is no longer in the ledger. {_REMEDY}")


def rolled_back(uid: str, stream: str, generation: int, index: int, had: int, known: int) -> LedgerRolledBack:
    return LedgerRolledBack(
        f"Run {uid}, stream {stream}: the ledger is at generation {generation}, sample index {index}, but had "
        f"acknowledged generation {had}, sample index {known}. {_REMEDY}"
    )


def lease_held(uid: str, stream: str, holder: str, acquired_at: float, left_s: float) -> LeaseHeld:
    return LeaseHeld(
        f"Run {uid}, stream {stream}, is served by {holder} since {date_of(acquired_at)}; its lease lasts {left_s:.1f} "
        f"s more unless it is renewed. Stop that server, or start this one with --standby: it takes over when that one "
        f"goes."
    )


def not_leader(uid: str, stream: str, found: int, had: int) -> NotLeader | LedgerRolledBack:
    if found < had:
        return LedgerRolledBack(
            f"Run {uid}, stream {stream}: the ledger is at server epoch {found}, but had given out {had}. {_REMEDY}"
        )
    return NotLeader(
        f"Run {uid}, stream {stream}: the ledger is at server epoch {found}, this server has {had}. Another server has "
        f"taken the run over, and this one must not write to it any more."
    )


def given_out_twice(name: str, epoch: int, holder: str | None) -> NotLeader:
    return NotLeader(
        f"{holder or 'nobody'} has the lease of run {name!r}, at this server's own epoch {epoch}: the ledger lost "
        "data, and gave it out twice"
    )


def fenced(uid: str, stream: str, found: int, had: int) -> Fenced | LedgerRolledBack:
    if found < had:
        return LedgerRolledBack(
            f"Run {uid}, stream {stream}: the ledger is at generation {found}, but the call's is {had}. {_REMEDY}"
        )
    now = f"the ledger is at generation {found}" if found else "the ledger has no generation of it yet"
    return Fenced(
        f"Run {uid}, stream {stream}: {now}, the call belongs to generation {had}. "
        f"That generation is over: its trainers must end, and drop what they have buffered."
    )


def order_mismatch(uid: str, stream: str, index: int, found: str, had: str) -> OrderMismatch:
    return OrderMismatch(
        f"Run {uid}, stream {stream}: sample index {index} is committed with digest {found}, the call has {had}: two "
        f"orders of the same run exist, so nothing more is served. Compare the servers' data, tokenizer and version."
    )


def attempt_used(uid: str, stream: str, attempt: str, generation: int) -> AttemptUsed:
    return AttemptUsed(
        f"Run {uid}, stream {stream}: the attempt id {attempt!r} opened generation {generation} already. An attempt "
        f"id is used once: give each launch, restarts included, an id of its own."
    )


def slot_taken(uid: str, stream: str, generation: int, rank: int) -> AttemptUsed:
    return AttemptUsed(
        f"Run {uid}, stream {stream}: rank {rank} of generation {generation} was served to another client process. "
        f"What that one got cannot be given out again: restart all ranks with a new attempt id."
    )


def generation_too_low(uid: str, stream: str, found: int, had: int) -> LedgerError:
    return LedgerError(
        f"Run {uid}, stream {stream}: the ledger is at generation {found}, the opening has {had}; expected {found + 1} "
        f"or more. Another opening came first: read the run again."
    )


def opened_already(uid: str, stream: str, generation: int, new_uid: str) -> LedgerError:
    return LedgerError(
        f"Run {uid}, stream {stream}, has opened generation {generation}, so it cannot take the uid {new_uid}. The "
        f"state belongs to another run: give this one another name (run: in the mixture file), or use an empty ledger."
    )


def uid_taken(uid: str, stream: str, name: str, holder: str) -> LedgerError:
    return LedgerError(
        f"Run {name!r}, stream {stream}, cannot have the uid {uid}: the ledger has it for run {holder!r}. A state "
        f"continues under the name that its run has in this ledger (run: in the mixture file), or in an empty ledger."
    )


def snapshot_differs(uid: str, stream: str, snapshot_id: str) -> LedgerError:
    return LedgerError(
        f"Run {uid}, stream {stream}: snapshot {snapshot_id} is in the ledger with another text; it never changes."
    )


def revision_number(uid: str, stream: str, newest: int, had: int) -> LedgerError:
    now = f"the ledger's newest revision is {newest}" if newest else "the ledger has no revision yet"
    return LedgerError(
        f"Run {uid}, stream {stream}: {now}, the call's is {had}; expected {newest + 1}. Another revision was made or "
        f"dropped since: read them again."
    )


def revision_too_early(uid: str, stream: str, newest: int, found: int, had: int) -> LedgerError:
    return LedgerError(
        f"Run {uid}, stream {stream}: revision {newest} begins at sample index {found}, the next one would at {had}; "
        f"expected {found} or more. Let it begin there, or drop revision {newest} first."
    )


def check_revision(uid: str, stream: str, revision: StoredRevision) -> None:
    """Refuses integers that a reader of JSON or Lua cannot hold."""
    _check_integers(uid, stream, [("revision", revision.number), ("sample_index", revision.sample_index)])


def check_commit(uid: str, stream: str, commit: Commit) -> None:
    """Refuses integers that a reader of JSON or Lua cannot hold."""
    named = [("sample_index", commit.sample_index), ("total_tokens", commit.total_tokens)]
    for spec, counters in commit.counters.items():
        named += [(f"{field} of {spec}", getattr(counters, field)) for field in ("samples", "rows", "tokens")]
    _check_integers(uid, stream, named)


def _check_integers(uid: str, stream: str, named: Sequence[tuple[str, int]]) -> None:
    for name, number in named:
        if not 0 <= number <= MAX_COUNTER:
            raise LedgerError(
                f"Run {uid}, stream {stream}: {name} is {number}; expected 0 to {MAX_COUNTER} (2^53 - 1), the integers "
                f"that every reader of the ledger holds exactly."
            )


def opening_mark(epoch: int, opening: Opening, committed: Commit) -> str:
    """Equal for repetitions of one opening write, which an unknown outcome makes necessary, and for nothing else.

    ``opened_at`` is left out: it is for people, and a repetition may be stamped anew.
    """
    fields = asdict(opening) | {"opened_at": 0, "epoch": epoch, "digest": committed.digest}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

"""What the rules refuse, in words: what the ledger holds, what the call says, and what to do."""

from __future__ import annotations

from tokenloom_server import errors
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.commands import Command, LeaderCommand
from tokenloom_server.ledger.records import Lease, StoredRevision, date_of


def _run(command: Command) -> str:
    return f"Run {command.uid}, stream {command.stream}"


def no_such_run(uid: str, stream: str) -> errors.NotFound:
    return errors.NotFound(
        f"The ledger has no run {uid}, stream {stream}: either another ledger was meant (--ledger), or this lost it."
    )


def renamed(uid: str, stream: str, actual_uid: str) -> errors.NotLeader:
    return errors.NotLeader(
        f"Run {uid}, stream {stream}, took the uid {actual_uid}, for a trainer that brought that run's state: whoever "
        f"still writes as {uid} serves it no longer. Read the run by its name again."
    )


_REMEDY = f"The ledger lost what it had acknowledged, so nothing goes on from it. {errors.LedgerRolledBack.remedy}."


def replaced(where: object) -> errors.LedgerRolledBack:
    return errors.LedgerRolledBack(
        f"The ledger {where} was deleted, moved or replaced while it was open (or its -wal file, which has the newest "
        f"commits): what is at its path now is another ledger. {_REMEDY}"
    )


def gone(uid: str, stream: str) -> errors.LedgerRolledBack:
    return errors.LedgerRolledBack(
        f"Run {uid}, stream {stream}, is no longer in the ledger. {_REMEDY}"
    )


def rolled_back(
    command: commands.Renew | commands.Commit, generation: int, sample_index: int
) -> errors.LedgerRolledBack:
    return errors.LedgerRolledBack(
        f"{_run(command)}: the ledger is at generation {generation}, sample index {sample_index}, but had "
        f"acknowledged generation {command.generation}, sample index {command.known_index}. {_REMEDY}"
    )


def revisions_lost(command: LeaderCommand, changes: int) -> errors.LedgerRolledBack:
    return errors.LedgerRolledBack(
        f"{_run(command)}: the ledger has {changes} changes of its revisions (made or dropped), but had acknowledged "
        f"{command.known_changes}. {_REMEDY}"
    )


def lease_held(
    command: commands.Acquire | commands.Import, lease: Lease, left_s: float
) -> errors.LeaseHeld:
    return errors.LeaseHeld(
        f"{_run(command)}, is served by {lease.holder} since {date_of(lease.acquired_at)}; its lease lasts "
        f"{left_s:.1f} s more unless it is renewed. Stop that server, or start this one with --standby: it takes over "
        "when that one goes."
    )


def is_elsewhere(name: str, elsewhere: str) -> errors.NotLeader:
    return errors.NotLeader(
        f"Run {name!r} is not served from this ledger: it is in {elsewhere}, or being copied from there. Serve it from "
        "that one (--ledger); where `tokenloom ledger copy` was interrupted, run it again."
    )


def is_there(command: commands.Import, uid: str, sample_index: int) -> errors.LedgerError:
    run = command.contents.run
    committed = run.committed.sample_index if run.committed is not None else 0
    return errors.LedgerError(
        f"Run {run.name!r}, stream {run.stream}, is in this ledger already: run_uid {uid}, sample index "
        f"{sample_index}; what is to be written has run_uid {run.uid}, sample index {committed}. Name an empty "
        "ledger, or have a backup replace it (tokenloom ledger restore --replace): what it has more is lost then."
    )


def not_leader(command: LeaderCommand, epoch: int) -> errors.NotLeader | errors.LedgerRolledBack:
    if epoch < command.epoch:
        return errors.LedgerRolledBack(
            f"{_run(command)}: the ledger is at server epoch {epoch}, but had given out {command.epoch}. {_REMEDY}"
        )
    return errors.NotLeader(
        f"{_run(command)}: the ledger is at server epoch {epoch}, this server has {command.epoch}. Another server has "
        f"taken the run over, and this one must not write to it any more."
    )


def given_out_twice(name: str, epoch: int, holder: str | None) -> errors.NotLeader:
    return errors.NotLeader(
        f"{holder or 'nobody'} has the lease of run {name!r}, at this server's own epoch {epoch}: the ledger lost "
        "data, and gave it out twice"
    )


def fenced(
    command: commands.ClaimSlot | commands.Commit | commands.Revise, generation: int
) -> errors.Fenced | errors.LedgerRolledBack:
    if generation < command.generation:
        return errors.LedgerRolledBack(
            f"{_run(command)}: the ledger is at generation {generation}, but the call's is {command.generation}. "
            f"{_REMEDY}"
        )
    present = (
        f"the ledger is at generation {generation}"
        if generation
        else "the ledger has no generation of it yet"
    )
    if generation == command.generation != 0:
        present += (
            ", which was closed: by a revision while nobody trained, or by restoring a backup"
        )
    return errors.Fenced(
        f"{_run(command)}: {present}, the call belongs to generation {command.generation}. That generation is over: "
        "its trainers must end, and drop what they have buffered."
    )


def order_mismatch(command: commands.Commit, digest: str) -> errors.OrderMismatch:
    return errors.OrderMismatch(
        f"{_run(command)}: sample index {command.committed.sample_index} is committed with digest {digest}, the call "
        f"has {command.committed.digest}: two orders of the same run exist, so nothing more is served. Compare the "
        "servers' data, tokenizer and version."
    )


def attempt_used(command: commands.Open, generation: int) -> errors.AttemptUsed:
    return errors.AttemptUsed(
        f"{_run(command)}: the attempt id {command.opening.attempt!r} opened generation {generation} already. "
        f"{errors.AttemptUsed.remedy}."
    )


def slot_taken(command: commands.ClaimSlot) -> errors.AttemptUsed:
    return errors.AttemptUsed(
        f"{_run(command)}: rank {command.rank} of generation {command.generation} was served to another client "
        "process. What that one got cannot be given out again: restart all ranks with a new attempt id. "
        f"{errors.AttemptUsed.remedy}."
    )


def generation_too_low(command: commands.Open, generation: int) -> errors.LedgerError:
    return errors.LedgerError(
        f"{_run(command)}: the ledger is at generation {generation}, the opening has {command.opening.generation}; "
        f"expected {generation + 1} or more. Another opening came first: read the run again."
    )


def opened_already(command: commands.Adopt, generation: int) -> errors.LedgerError:
    return errors.LedgerError(
        f"{_run(command)}, has opened generation {generation}, so it cannot take the uid {command.new_uid}. The "
        f"state belongs to another run: give this one another name (run: in the mixture file), or use an empty ledger."
    )


def uid_taken(uid: str, stream: str, name: str, holder: str) -> errors.LedgerError:
    return errors.LedgerError(
        f"Run {name!r}, stream {stream}, cannot have the uid {uid}: the ledger has it for run {holder!r}. A state "
        f"continues under the name that its run has in this ledger (run: in the mixture file), or in an empty ledger."
    )


def other_schema(description: str, version: object, ours: int) -> errors.LedgerError:
    return errors.LedgerError(
        f"The ledger {description} has schema version {version}, this release has {ours}: another Tokenloom wrote it, "
        "and it is left as it is. Use the release that wrote it, or give another ledger with --ledger: in an empty one "
        "a run goes on from a trainer's checkpoint."
    )


def snapshot_differs(command: commands.SaveSnapshot) -> errors.LedgerError:
    return errors.LedgerError(
        f"{_run(command)}: snapshot {command.snapshot.id} is in the ledger with another text; it never changes."
    )


def revisions_changed(command: commands.Open, changes: int) -> errors.LedgerError:
    return errors.LedgerError(
        f"{_run(command)}: the call knows of {command.known_changes} changes of the revisions, the ledger has "
        f"{changes}: one was made or dropped since, so read them again."
    )


def pin_is_late(command: commands.Pin, number: int) -> errors.LedgerError:
    return errors.LedgerError(
        f"{_run(command)}: change {command.number} of the pinned resume point came late: change {number} of it, or an "
        "opening, came first. Nothing was changed."
    )


def revision_number(command: commands.Revise, newest: int, changes: int) -> errors.LedgerError:
    present = (
        f"the ledger's newest revision is {newest}" if newest else "the ledger has no revision yet"
    )
    return errors.LedgerError(
        f"{_run(command)}: {present}, the call's is {command.revision.number}; expected {newest + 1}. The call knows "
        f"of {command.known_changes} changes of the revisions, the ledger has {changes}: one was made or dropped "
        "since, so read them again."
    )


def revision_too_early(command: commands.Revise, newest: StoredRevision) -> errors.LedgerError:
    return errors.LedgerError(
        f"{_run(command)}: revision {newest.number} begins at sample index {newest.sample_index}, the next one would "
        f"at {command.revision.sample_index}; expected {newest.sample_index} or more. Let it begin there, or drop "
        f"revision {newest.number} first."
    )


def out_of_range(command: Command, name: str, number: int) -> errors.LedgerError:
    return errors.LedgerError(
        f"{_run(command)}: {name} is {number}; expected 0 to {MAX_COUNTER} (2^53 - 1), the integers that "
        f"every reader of the ledger holds exactly."
    )

"""The rules of the ledger, as one pure function: what a run's ledger holds and a command → a refusal, or what to write.

Whoever stores a ledger reads the ``Head``, asks ``decide`` and writes, all in one transaction. Redis decides in Lua, so
that a write is one round trip; ``tests/ledger/test_machine.py`` holds that against ``decide``, command by command.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias, TypedDict

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger import commands, records, refusals
from tokenloom_server.ledger.commands import Command, LeaderCommand
from tokenloom_server.ledger.records import (
    CommittedState,
    JournalEntry,
    Lease,
    Opening,
    StoredRevision,
    StoredSnapshot,
)

#: Why a command is refused: the error that its caller gets. Nothing is written then.
Refusal: TypeAlias = TokenloomError

#: So many servers more than those that a backup knows may have led since: whoever did stays below the epoch after it.
EPOCHS_SINCE_BACKUP = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a command is decided by: the run at one moment, without anything that grows with it.

    Those that may be None are there for some commands alone: the lease, and entries of the run's lists, each the one
    that has the attempt, rank, number, id or uid which the command names.
    """

    #: The ledger's clock, Unix time in seconds.
    now: float
    name: str
    #: Differs from the command's where the run took another uid since.
    uid: str
    epoch: int
    #: The present generation; 0 before the first.
    generation: int
    #: ``opening_mark`` of the present generation; empty before the first.
    opening_mark: str
    #: The committed sample index and its digest; 0 and empty before the first generation.
    sample_index: int
    digest: str
    #: How many changes of the revisions there were.
    revision_changes: int = 0
    #: The number that the next change of the pin has at least, by the present epoch.
    pin_number: int = 0
    #: The newest generation that was closed.
    closed_generation: int = 0
    #: The ledger that the run is in instead.
    elsewhere: str = ""
    #: ``Acquire``, ``Renew``, ``Release``, ``Open``, ``Import``, ``Move``: None before the first server.
    lease: Lease | None = None
    #: ``Revise``: the newest revision, and the one that has the command's number.
    newest_revision: StoredRevision | None = None
    same_number: StoredRevision | None = None
    #: ``Open``: the generation that the attempt opened.
    attempt_generation: int | None = None
    #: ``ClaimSlot``: the nonce that has the rank.
    slot_nonce: str | None = None
    #: ``SaveSnapshot``: the text that the id has.
    snapshot_text: str | None = None
    #: ``Adopt``, ``Import``: the name of the run that has the new uid.
    uid_holder: str | None = None


class RunFields(TypedDict, total=False):
    """Fields of a run to set; those that are left out stay."""

    uid: str
    epoch: int
    generation: int
    opening_mark: str
    pin: str | None
    pin_number: int
    revision_changes: int
    closed_generation: int
    elsewhere: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """What a command changes. Where everything is left out it changes nothing: what it asks for is so already."""

    #: What the call returns: the epoch, the committed sample index, or the number of changes of the revisions; 0 where
    #: it returns nothing.
    answer: int = 0
    run: RunFields = field(default_factory=RunFields)
    #: A new run of this name.
    created: commands.Create | None = None
    #: The whole run, in place of all that is there of it.
    contents: records.RunContents | None = None
    lease: Lease | None = None
    #: A new generation, which forgets the slots of the one before.
    opening: Opening | None = None
    #: Written with the time ``Head.now``.
    committed: CommittedState | None = None
    journal_entry: JournalEntry | None = None
    thin_journal: bool = False
    #: (rank, nonce)
    slot: tuple[int, str] | None = None
    revision: StoredRevision | None = None
    #: The first number to remove.
    drop_revisions: int | None = None
    snapshot: StoredSnapshot | None = None


def decide(head: Head | None, command: Command) -> Refusal | Writes:
    """What becomes of a command, where the ledger holds ``head`` of its run; None where it has no such run.

    For ``Create``, ``head`` is of the run that has the uid; for ``Import`` of the one that has the name, and where
    there is none of the one that has the uid.
    """
    refusal = refuse_integers(command)
    if refusal is not None:
        return refusal
    if isinstance(command, commands.Create):
        return _create(head, command)
    if isinstance(command, commands.Import):
        return _import(head, command)
    if head is None:
        named_epoch = isinstance(command, LeaderCommand)
        return (refusals.gone if named_epoch else refusals.no_such_run)(command.uid, command.stream)
    is_adopted = isinstance(command, commands.Adopt) and head.uid == command.new_uid
    refusal = None if is_adopted else refuse_uid(command.uid, command.stream, head.uid)
    if refusal is None and not isinstance(command, commands.Move):
        refusal = refuse_elsewhere(head.name, head.elsewhere)
    if refusal is None and isinstance(command, LeaderCommand):
        refusal = _refuse_epoch(head, command) or _refuse_lost_revisions(head, command)
    return refusal or _RULES[type(command)](head, command)


def refuse_uid(uid: str, stream: str, actual_uid: str | None) -> Refusal | None:
    """Refuses who names a run by a uid that it does not have (any more); None: there is no such run."""
    if actual_uid is None:
        return refusals.no_such_run(uid, stream)
    return None if actual_uid == uid else refusals.renamed(uid, stream, actual_uid)


def refuse_elsewhere(name: str, elsewhere: str) -> Refusal | None:
    """Refuses who asks for a run that is in another ledger."""
    return refusals.is_elsewhere(name, elsewhere) if elsewhere else None


def refuse_integers(command: Command) -> Refusal | None:
    """Refuses integers that a reader of JSON or Lua cannot hold, whatever the ledger has."""
    match command:
        case commands.Open(committed=committed) | commands.Commit(committed=committed):
            named = [
                ("sample_index", committed.sample_index),
                ("total_tokens", committed.total_tokens),
            ]
            for spec, counters in committed.counters.items():
                named.append((f"samples of {spec}", counters.samples))
                named.append((f"rows of {spec}", counters.rows))
                named.append((f"tokens of {spec}", counters.tokens))
        case commands.Revise(revision=revision):
            named = [("revision", revision.number), ("sample_index", revision.sample_index)]
        case _:
            return None
    for name, number in named:
        if not 0 <= number <= MAX_COUNTER:
            return refusals.out_of_range(command, name, number)
    return None


def opening_mark(epoch: int, opening: Opening, committed: CommittedState) -> str:
    """Equal for repetitions of one opening, which an unknown outcome makes necessary, and for nothing else.

    ``opened_at`` is left out: it is for people, and a repetition may be stamped anew.
    """
    fields = asdict(opening) | {"opened_at": 0, "epoch": epoch, "digest": committed.digest}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


# Guards: each returns the refusal, or None where nothing is wrong.


def _refuse_epoch(head: Head, command: LeaderCommand) -> Refusal | None:
    if head.epoch != command.epoch:
        return refusals.not_leader(command, head.epoch)
    return None


def _refuse_lost_revisions(head: Head, command: LeaderCommand) -> Refusal | None:
    if head.revision_changes < command.known_changes:
        return refusals.revisions_lost(command, head.revision_changes)
    return None


def _refuse_generation(
    head: Head, command: commands.ClaimSlot | commands.Commit | commands.Revise
) -> Refusal | None:
    if head.generation <= head.closed_generation or head.generation != command.generation:
        return refusals.fenced(command, head.generation)
    return None


def _refuse_rolled_back(head: Head, command: commands.Renew | commands.Commit) -> Refusal | None:
    """Where (generation, committed index) is less than what the server knows; a new generation may begin anywhere."""
    if (head.generation, head.sample_index) < (command.generation, command.known_index):
        return refusals.rolled_back(command, head.generation, head.sample_index)
    return None


def _is_committed(head: Head, sample_index: int) -> bool:
    return sample_index <= head.sample_index


# What each command does, for the run's leader.


def _create(head: Head | None, command: commands.Create) -> Refusal | Writes:
    if head is None:
        return Writes(created=command)
    if (head.name, head.uid) != (command.name, command.uid):
        return refusals.uid_taken(command.uid, command.stream, command.name, head.name)
    return refuse_elsewhere(head.name, head.elsewhere) or Writes()


def _import(head: Head | None, command: commands.Import) -> Refusal | Writes:
    run = command.contents.run
    epoch, closed = run.epoch, run.closed_generation
    generation = run.opening.generation if run.opening is not None else 0
    if head is not None:
        holder = head.uid_holder if head.name == run.name else head.name
        if holder not in (None, run.name):
            return refusals.uid_taken(run.uid, run.stream, run.name, holder)
        if head.lease is not None and (left_s := head.lease.left_s(head.now)):
            return refusals.lease_held(command, head.lease, left_s)
        if (
            not head.elsewhere or head.elsewhere != command.elsewhere or epoch < head.epoch
        ):  # not the same move again
            refusal = refuse_elsewhere(head.name, head.elsewhere)
            if refusal is not None or not command.replace:
                return refusal or refusals.is_there(command, head.uid, head.sample_index)
        epoch = max(epoch, head.epoch)
        generation, closed = max(generation, head.generation), max(closed, head.closed_generation)
    run = replace(run, epoch=epoch + 1, lease=None, elsewhere=command.elsewhere)
    contents = replace(command.contents, run=run)
    if command.from_backup:
        run = replace(
            run,
            epoch=run.epoch + EPOCHS_SINCE_BACKUP,
            closed_generation=max(generation, closed),
            pin=None,
        )
        contents = replace(contents, run=run, slots={})
    created = commands.Create(run.uid, run.stream, run.name, run.record) if head is None else None
    fields: RunFields = {"uid": run.uid} if head is not None and head.uid != run.uid else {}
    return Writes(answer=run.epoch, created=created, run=fields, contents=contents)


def _acquire(head: Head, command: commands.Acquire) -> Refusal | Writes:
    lease = head.lease
    if lease is not None and lease.holder != command.holder and lease.left_s(head.now):
        return refusals.lease_held(command, lease, lease.left_s(head.now))
    epoch = max(head.epoch, command.beyond_epoch) + 1
    # That nobody trains (0) is the last word of a server that let its lease go; of a killed one ranks may be back.
    heard_at = (
        lease.heard_at if lease is not None and (lease.heard_at or not lease.lapses_at) else None
    )
    taken = Lease(
        holder=command.holder,
        acquired_at=head.now,
        lapses_at=head.now + command.lease_s,
        lasts_s=command.lease_s,
        heard_at=heard_at,
    )
    return Writes(answer=epoch, run={"epoch": epoch, "pin_number": 0}, lease=taken)


def _renew(head: Head, command: commands.Renew) -> Refusal | Writes:
    refusal = _refuse_rolled_back(head, command)
    if refusal is not None:
        return refusal
    if head.lease is None or head.lease.holder != command.holder:
        holder = head.lease.holder if head.lease is not None else None
        return refusals.given_out_twice(head.name, command.epoch, holder)
    lapses_at = head.now + command.lease_s
    return Writes(
        lease=replace(
            head.lease, lapses_at=lapses_at, lasts_s=command.lease_s, heard_at=command.heard_at
        )
    )


def _adopt(head: Head, command: commands.Adopt) -> Refusal | Writes:
    if head.uid != command.uid:  # a repetition
        return Writes()
    if head.generation:
        return refusals.opened_already(command, head.generation)
    if command.new_uid == command.uid:
        return Writes()
    if head.uid_holder is not None:
        return refusals.uid_taken(command.new_uid, command.stream, head.name, head.uid_holder)
    return Writes(run={"uid": command.new_uid})


def _open(head: Head, command: commands.Open) -> Refusal | Writes:
    opening = command.opening
    mark = opening_mark(command.epoch, opening, command.committed)
    if (opening.generation, mark) == (head.generation, head.opening_mark):  # a repetition
        return Writes()
    if head.attempt_generation is not None:
        return refusals.attempt_used(command, head.attempt_generation)
    newest = max(head.generation, head.closed_generation)
    if opening.generation <= newest:
        return refusals.generation_too_low(command, newest)
    changes, revision = head.revision_changes, command.revision
    if revision is not None and changes != command.known_changes:
        return refusals.revisions_changed(command, changes)
    changes += revision is not None
    return Writes(
        run={
            "generation": opening.generation,
            "opening_mark": mark,
            "pin": None,
            "pin_number": head.pin_number + 1,
            "revision_changes": changes,
        },
        lease=replace(head.lease, heard_at=None)
        if head.lease
        else None,  # what was heard is of the one before
        opening=opening,
        committed=command.committed,
        revision=revision,
        journal_entry=JournalEntry(
            generation=opening.generation,
            sample_index=opening.start_index,
            state=opening.start_state,
        ),
    )


def _claim_slot(head: Head, command: commands.ClaimSlot) -> Refusal | Writes:
    refusal = _refuse_generation(head, command)
    if refusal is not None:
        return refusal
    if head.slot_nonce not in (None, command.nonce):
        return refusals.slot_taken(command)
    return Writes(slot=(command.rank, command.nonce))


def _commit(head: Head, command: commands.Commit) -> Refusal | Writes:
    refusal = _refuse_generation(head, command) or _refuse_rolled_back(head, command)
    if refusal is not None:
        return refusal
    committed = command.committed
    if committed.sample_index == head.sample_index and committed.digest != head.digest:
        return refusals.order_mismatch(command, head.digest)
    if _is_committed(head, committed.sample_index):
        return Writes(answer=head.sample_index)
    entry = JournalEntry(
        generation=command.generation, sample_index=committed.sample_index, state=committed.state
    )
    return Writes(
        answer=committed.sample_index,
        committed=committed,
        journal_entry=entry if command.journal else None,
    )


def _revise(head: Head, command: commands.Revise) -> Refusal | Writes:
    revision, newest, changes = command.revision, head.newest_revision, head.revision_changes
    if revision == head.same_number:  # a repetition
        return Writes(answer=changes)
    number = newest.number if newest is not None else 0
    if (changes, revision.number) != (command.known_changes, number + 1):
        return refusals.revision_number(command, number, changes)
    if command.generation and (refusal := _refuse_generation(head, command)) is not None:
        return refusal
    if newest is not None and revision.sample_index < newest.sample_index:
        return refusals.revision_too_early(command, newest)
    closed = command.generation or head.closed_generation
    run: RunFields = {"revision_changes": changes + 1, "closed_generation": closed}
    return Writes(answer=changes + 1, run=run, revision=revision)


def _drop_revisions(head: Head, command: commands.DropRevisions) -> Refusal | Writes:
    changes = head.revision_changes
    if (
        changes != command.known_changes
    ):  # a repetition: a revision of the same number may be another one by now
        return Writes(answer=changes)
    return Writes(
        answer=changes + 1, run={"revision_changes": changes + 1}, drop_revisions=command.number
    )


def _pin(head: Head, command: commands.Pin) -> Refusal | Writes:
    if command.number < head.pin_number:
        return refusals.pin_is_late(command, head.pin_number)
    return Writes(run={"pin": command.pin, "pin_number": command.number})


def _save_snapshot(head: Head, command: commands.SaveSnapshot) -> Refusal | Writes:
    if head.snapshot_text is None:
        return Writes(snapshot=command.snapshot)
    if head.snapshot_text != command.snapshot.text:
        return refusals.snapshot_differs(command)
    return Writes()


#: The rule of each command; short ones stand here.
_RULES: dict[type[Command], Callable[[Head, Any], Refusal | Writes]] = {
    commands.Acquire: _acquire,
    commands.Renew: _renew,
    commands.Release: lambda head, command: Writes(
        lease=replace(head.lease, lapses_at=0.0) if head.lease else None
    ),
    commands.Move: lambda head, command: Writes(
        run={"elsewhere": command.elsewhere},
        lease=replace(head.lease, lapses_at=0.0) if head.lease else None,
    ),
    commands.Adopt: _adopt,
    commands.Open: _open,
    commands.ClaimSlot: _claim_slot,
    commands.Commit: _commit,
    commands.ThinJournal: lambda head, command: Writes(thin_journal=True),
    commands.Pin: _pin,
    commands.Revise: _revise,
    commands.DropRevisions: _drop_revisions,
    commands.SaveSnapshot: _save_snapshot,
}

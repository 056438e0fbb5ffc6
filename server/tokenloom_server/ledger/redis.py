"""The ledger in Redis. Each write is one Lua script (``lua/``), so it happens as a whole or not at all.

What a plain client finds (``redis-cli``), for a run with the id ``U`` and the stream ``train``:

==================================  =======  ==================================================================
key                                 type     holds
==================================  =======  ==================================================================
``tokenloom:runs``                  hash     ``name/stream`` → U
``tokenloom:uids``                  hash     ``uid/stream`` → U, for runs that took a uid from elsewhere (adopt)
``tokenloom:{U}:train``             hash     ``name stream uid record epoch pin journal_bytes revision_changes``;
                                             the lease: ``lease_holder lease_acquired_at lease_lapses_at lease_s``
                                             ``heard_at``; generation: ``generation opening_mark closed_generation``;
                                             committed state: ``sample_index total_tokens digest state committed_at``
``tokenloom:{U}:train:samples``     hash     spec → committed samples
``tokenloom:{U}:train:rows``        hash     spec → committed rows
``tokenloom:{U}:train:tokens``      hash     spec → committed tokens
``tokenloom:{U}:train:openings``    hash     generation → opening, as JSON
``tokenloom:{U}:train:attempts``    hash     attempt → generation
``tokenloom:{U}:train:slots``       hash     rank → nonce of the client process, in the present generation
``tokenloom:{U}:train:journal``     zset     ``generation:sample_index``, 16 digits each, all with score 0
``tokenloom:{U}:train:states``      hash     the same → state
``tokenloom:{U}:train:snapshots``   hash     id → snapshot, as JSON
``tokenloom:{U}:train:revisions``   list     revisions, as JSON, oldest first
==================================  =======  ==================================================================

The braces are part of the keys: they keep a run's keys in one slot of a cluster. U is the uid that the run was created
with, and stays in the keys when the run takes another uid; ``tokenloom:runs`` leads to it either way. For example::

    redis-cli HGET tokenloom:runs wiki-and-code/train
    redis-cli HGETALL 'tokenloom:{…}:train:tokens'

Nothing here expires, and nothing but ``open`` and ``commit`` writes the committed state and counters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from tokenloom_server.errors import LedgerError, TokenloomError
from tokenloom_server.ledger import commands, refusals
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Command, LeaderCommand
from tokenloom_server.ledger.records import (
    CLOCK_SLACK_S,
    CommittedState,
    Counters,
    JournalEntry,
    Lease,
    Opening,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)
from tokenloom_server.ledger.redis_client import RedisClient
from tokenloom_server.ledger.rules import Head, Writes, decide, opening_mark, refuse_integers, refuse_uid

RUNS = "tokenloom:runs"
UIDS = "tokenloom:uids"

#: In the order that ``lua/run.lua`` names them.
KEYS_OF_A_RUN = (
    "", ":samples", ":rows", ":tokens", ":openings", ":attempts", ":slots", ":journal", ":states", ":snapshots",
    ":revisions",
)  # fmt: skip

#: Fields of commands that every script gets, around its own arguments.
_SENT_BY_ALL = ("uid", "stream", "epoch", "known_changes")

#: Fields of a run that decide, and are integers; 0 where they were never written.
_INTEGERS = ("epoch", "generation", "sample_index", "revision_changes", "closed_generation")

#: Fields of an opening by the names that they had up to version 1 of the wire protocol.
_RENAMED = {"group_steps": "group_micro_steps", "ramp": "batch_plans"}


class RedisLedger(Ledger):
    """See ``Ledger``."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        """Raises ``ValueError`` for a malformed URL."""
        self._client = RedisClient(url)
        self._clock = clock
        #: (uid, stream) → the id in the keys, for uids that a write succeeded with. That never changes.
        self._homes: dict[tuple[str, str], str] = {}

    @property
    def description(self) -> str:
        return self._client.description

    def check(self) -> None:
        self._client.check()

    def close(self) -> None:
        self._client.close()

    # Runs by name.

    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        stored = self.read_run(name, stream)
        if stored is not None:
            return stored
        self._refuse_taken(uid, stream, name)
        self._run_script(commands.Create(uid, stream, name, record), uid)
        # Two keys in two slots of a cluster: a run exists once its name leads to it.
        self._client.read(("HSETNX", RUNS, f"{name}/{stream}", uid))
        stored = self.read_run(name, stream)
        if stored is None:
            raise LedgerError(f"{self.description} lost run {name!r}, stream {stream}, right after it was created.")
        if stored.uid != uid and self._home(stored.uid, stream) != uid:  # another server came first
            self._client.read(("DEL", keys_of(uid, stream)[0]))
        return stored

    def read_run(self, name: str, stream: str) -> StoredRun | None:
        (home,) = self._client.read(("HGET", RUNS, f"{name}/{stream}"))
        if home is None:
            return None
        run, opening, *counters = self._client.run_script("read", keys_of(home, stream), ["", ""])
        fields = _paired(run)
        samples, rows, tokens = (_paired(each) for each in counters)
        if not fields:
            raise LedgerError(
                f"{self.description} names run {name!r}, stream {stream}, but does not hold it: keys were lost. "
                f"Restore them, or remove its field from {RUNS} and resume from a trainer's checkpoint."
            )
        committed = None
        if "sample_index" in fields:
            committed = CommittedState(
                sample_index=int(fields["sample_index"]),
                total_tokens=int(fields["total_tokens"]),
                digest=fields["digest"],
                state=fields["state"],
                counters={
                    spec: Counters(samples=int(count), rows=int(rows[spec]), tokens=int(tokens[spec]))
                    for spec, count in samples.items()
                },
            )
        return StoredRun(
            name=name,
            stream=stream,
            uid=fields["uid"],
            record=fields["record"],
            epoch=int(fields["epoch"]),
            opening=_opening(opening) if opening else None,
            committed=committed,
            committed_at=float(fields["committed_at"]) if committed else None,
            pin=fields.get("pin"),
            lease=_lease(fields),
            **{name: int(fields.get(name, 0)) for name in ("revision_changes", "closed_generation")},
        )

    def run_names(self) -> Sequence[tuple[str, str]]:
        (fields,) = self._client.read(("HKEYS", RUNS))
        return sorted((field.rpartition("/")[0], field.rpartition("/")[2]) for field in fields)

    # Writes: a script each.

    def execute(self, command: Command) -> int:
        refusal = refuse_integers(command)
        if refusal is not None:
            raise refusal
        home = self._home(command.uid, command.stream)
        answer = self._adopt(command, home) if isinstance(command, commands.Adopt) else self._run_script(command, home)
        self._homes[command.uid, command.stream] = home
        return answer

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        if len(some) == 1 or len({each.verb for each in some}) > 1 or any(map(refuse_integers, some)):
            return super().execute_all(some)
        calls = [(keys_of(self._home(each.uid, each.stream), each.stream), self._sent_of(each)) for each in some]
        replies = self._client.run_script_often(some[0].verb, calls)
        return [_answer_of(command, reply) for command, reply in zip(some, replies, strict=True)]

    def _run_script(self, command: Command, home: str, *more: str) -> int:
        """What the command's script answers. Where it refuses, raises what the rules say of the run as it saw it."""
        arguments = self._sent_of(command, *more)
        answer = _answer_of(command, self._client.run_script(command.verb, keys_of(home, command.stream), arguments))
        if isinstance(answer, TokenloomError):
            raise answer
        return answer

    def _sent_of(self, command: Command, *more: str) -> list[Any]:
        epoch, known = (command.epoch, command.known_changes) if isinstance(command, LeaderCommand) else ("", "")
        return [command.uid, epoch, *_arguments(command, self._clock), *more, known]

    def _adopt(self, command: commands.Adopt, home: str) -> int:
        """Gives a run its new uid, in three steps: that uid's key and the run's may lie in two slots of a cluster."""
        self._run_script(command, home, "check")
        if command.new_uid == command.uid:
            return 0
        self._announce(home, command.stream, command.new_uid)
        return self._run_script(command, home, "do")

    # A run's lists.

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        (texts,) = self._read(uid, stream, ("HVALS", ":openings"))
        return sorted(map(_opening, texts), key=lambda opening: opening.generation)

    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        while True:
            newest = (f"[{_member(generation, at_most)}", f"[{_member(generation, 0)}", "LIMIT", 0, 1)
            (members,) = self._read(uid, stream, ("ZREVRANGEBYLEX", ":journal", *newest))
            if not members:
                return None
            (state,) = self._read(uid, stream, ("HGET", ":states", members[0]))
            if state is not None:  # thinned away between the two
                return JournalEntry(generation=generation, sample_index=int(members[0].partition(":")[2]), state=state)

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        entries, size_bytes = self._read(uid, stream, ("ZCARD", ":journal"), ("HGET", "", "journal_bytes"))
        return int(entries), int(size_bytes or 0)

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        (texts,) = self._read(uid, stream, ("LRANGE", ":revisions", 0, -1))
        return [StoredRevision(**json.loads(text)) for text in texts]

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        (texts,) = self._read(uid, stream, ("HVALS", ":snapshots"))
        snapshots = (StoredSnapshot(**json.loads(text)) for text in texts)
        return sorted(snapshots, key=lambda each: (-each.saved_at, -each.sample_index, each.id))

    def snapshot_count(self, uid: str, stream: str) -> int:
        return int(self._read(uid, stream, ("HLEN", ":snapshots"))[0])

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None:
        (text,) = self._read(uid, stream, ("HGET", ":snapshots", snapshot_id))
        return None if text is None else StoredSnapshot(**json.loads(text))

    def _read(self, uid: str, stream: str, *requests: tuple[str | int, ...]) -> list[Any]:
        """Answers to Redis commands whose second word is a key's ending; raises where the uid is not the run's."""
        key = keys_of(self._home(uid, stream), stream)[0]
        placed = [(request[0], f"{key}{request[1]}", *request[2:]) for request in requests]
        actual_uid, *answers = self._client.read(("HGET", key, "uid"), *placed)
        refusal = refuse_uid(uid, stream, actual_uid)
        if refusal is not None:
            raise refusal
        return answers

    # Uids. Keys carry the one that the run was created with; ``tokenloom:uids`` knows the others.

    def _home(self, uid: str, stream: str) -> str:
        """The id in a run's keys; the uid itself where there is no such run."""
        home = self._homes.get((uid, stream))
        if home is not None:
            return home
        (actual_uid,) = self._client.read(("HGET", keys_of(uid, stream)[0], "uid"))
        if actual_uid == uid:
            return uid
        (adopted,) = self._client.read(("HGET", UIDS, f"{uid}/{stream}"))
        return uid if adopted is None else str(adopted)

    def _refuse_taken(self, uid: str, stream: str, name: str) -> None:
        key = keys_of(self._home(uid, stream), stream)[0]
        holder, actual_uid = self._client.read(("HGET", key, "name"), ("HGET", key, "uid"))
        if actual_uid == uid and holder != name:
            raise refusals.uid_taken(uid, stream, name, holder)

    def _announce(self, home: str, stream: str, new_uid: str) -> None:
        """Makes ``new_uid`` lead to the run's keys, before the run takes it: until then it leads nowhere."""
        if new_uid == home:
            return
        (name,) = self._client.read(("HGET", keys_of(home, stream)[0], "name"))
        self._refuse_taken(new_uid, stream, name)
        field = f"{new_uid}/{stream}"
        _, actual_home = self._client.read(("HSETNX", UIDS, field, home), ("HGET", UIDS, field))
        if actual_home != home:
            (holder,) = self._client.read(("HGET", keys_of(actual_home, stream)[0], "name"))
            raise refusals.uid_taken(new_uid, stream, name, holder)


def _answer_of(command: Command, reply: Sequence[Any]) -> int | TokenloomError:
    """What a command's script answers; where it refuses, what the rules say of the run as it saw it."""
    done, *answer = reply
    if done:
        return int(answer[0]) if answer else 0
    decision = decide(_head(command, *answer), command)
    assert not isinstance(decision, Writes), f"a script refused what the rules allow: {command}"
    return decision


def _arguments(command: Command, clock: Callable[[], float]) -> Sequence[Any]:
    """The arguments of the command's script after uid and epoch: the command's fields, where it has no need of others.
    None is an empty argument."""
    match command:
        case commands.Create():
            return (command.name, command.stream, command.record)
        case commands.Open(opening=opening, revision=revision):
            return (
                opening.generation,
                opening.attempt,
                opening_mark(command.epoch, opening, command.committed),
                _json(opening),
                _member(opening.generation, opening.start_index),
                opening.start_state,
                _json(revision) if revision is not None else "",
                *_committed(command.committed, clock()),
            )
        case commands.Commit():
            member = _member(command.generation, command.committed.sample_index) if command.journal else ""
            return (command.generation, member, command.known_index, *_committed(command.committed, clock()))
        case commands.Revise(revision=revision, generation=generation):
            return (revision.number, revision.sample_index, _json(revision), generation)
        case commands.SaveSnapshot(snapshot=snapshot):
            return (snapshot.id, snapshot.text, _json(snapshot))
    names = [field.name for field in fields(command) if field.name not in _SENT_BY_ALL]
    values = [getattr(command, name) for name in names]
    slack = (CLOCK_SLACK_S,) if isinstance(command, commands.Acquire) else ()
    return ["" if value is None else value for value in (*values, *slack)]


def _committed(commit: CommittedState, committed_at: float) -> list[str | float]:
    """As ``put_committed`` of ``lua/run.lua`` takes it."""
    counters = commit.counters.values()
    return [
        commit.sample_index,
        commit.total_tokens,
        commit.digest,
        commit.state,
        committed_at,
        len(commit.counters),
        *commit.counters,
        *(each.samples for each in counters),
        *(each.rows for each in counters),
        *(each.tokens for each in counters),
    ]


def _head(
    command: Command,
    now: str,
    names: Sequence[str],
    values: Sequence[str | None],
    newest_revision: str | None,
    item: str | None,
) -> Head | None:
    """What ``refused`` of ``lua/run.lua`` answers; None where there is no such run."""
    run = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if not run:
        return None
    items: dict[str, Any] = {name: int(run.get(name, 0)) for name in _INTEGERS}
    if item is not None:
        match command:
            case commands.Open():
                items["attempt_generation"] = int(item)
            case commands.ClaimSlot():
                items["slot_nonce"] = item
            case commands.SaveSnapshot():
                items["snapshot_text"] = item
            case commands.Revise():
                items["same_number"] = StoredRevision(**json.loads(item))
    return Head(
        now=float(now),
        name=run["name"],
        uid=run["uid"],
        lease=_lease(run),
        opening_mark=run.get("opening_mark", ""),
        digest=run.get("digest", ""),
        newest_revision=None if newest_revision is None else StoredRevision(**json.loads(newest_revision)),
        **items,
    )


def keys_of(home: str, stream: str) -> list[str]:
    """All keys of a run, as every script gets them."""
    return [f"tokenloom:{{{home}}}:{stream}{ending}" for ending in KEYS_OF_A_RUN]


def _opening(text: str) -> Opening:
    """Reads what ``_json`` wrote, also before two of its fields had the names of today."""
    fields = json.loads(text)
    return Opening(**{_RENAMED.get(name, name): value for name, value in fields.items()})


def _json(record: Opening | StoredRevision | StoredSnapshot) -> str:
    return json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":"))


def _member(generation: int, sample_index: int) -> str:
    return f"{generation:016d}:{sample_index:016d}"


def _lease(fields: dict[str, str]) -> Lease | None:
    if "lease_holder" not in fields:
        return None
    heard_at = fields.get("heard_at")
    return Lease(
        holder=fields["lease_holder"],
        acquired_at=float(fields["lease_acquired_at"]),
        lapses_at=float(fields["lease_lapses_at"]),
        lasts_s=float(fields["lease_s"]),
        heard_at=float(heard_at) if heard_at else None,
    )


def _paired(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))

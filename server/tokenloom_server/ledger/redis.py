"""The ledger in Redis. Each write is one Lua script (``lua/``), so it happens as a whole or not at all.

What a plain client finds (``redis-cli``), for a run with the id ``U`` and the stream ``train``:

==================================  =======  ==================================================================
key                                 type     holds
==================================  =======  ==================================================================
``tokenloom:schema``                string   version of this layout (``SCHEMA_VERSION``)
``tokenloom:runs``                  hash     ``name/stream`` → U
``tokenloom:uids``                  hash     ``uid/stream`` → U, for runs that took a uid from elsewhere (adopt)
``tokenloom:{U}:train``             hash     ``name stream uid record epoch pin journal_bytes revision_changes``
                                             ``elsewhere pin_number``;
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
``tokenloom:{U}:train:history:…``   hash     the run's history: see ``redis_history``
==================================  =======  ==================================================================

The braces keep a run's keys in one slot of a cluster. U is the uid that it was created with, whatever it takes later.
Nothing expires, and nothing but ``open`` and ``commit`` writes the committed state and counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from tokenloom_server.errors import LedgerError, TokenloomError
from tokenloom_server.ledger import commands, records, redis_rows, refusals, rules
from tokenloom_server.ledger.base import HistoryStore, Ledger
from tokenloom_server.ledger.commands import Command, LeaderCommand
from tokenloom_server.ledger.redis_client import RedisClient
from tokenloom_server.ledger.redis_rows import (
    RedisHistory,
    json_of,
    keys_of,
    lease_of,
    member_of,
    paired,
    revision_of,
    snapshot_of,
)
from tokenloom_server.ledger.rules import Head, Writes, decide, refuse_integers, refuse_uid

RUNS, UIDS, SCHEMA = "tokenloom:runs", "tokenloom:uids", "tokenloom:schema"
#: Another layout takes the next number, and none is used again: a Redis of any other is refused.
SCHEMA_VERSION = 2
#: Fields of commands that every script gets, around its own arguments.
_SENT_BY_ALL = ("uid", "stream", "epoch", "known_changes")
#: Fields of a run that decide: integers and texts; 0 and empty where they were never written.
_INTEGERS = (
    "epoch",
    "generation",
    "sample_index",
    "revision_changes",
    "closed_generation",
    "pin_number",
)
_TEXTS = ("name", "uid", "opening_mark", "elsewhere", "digest")
#: What a script says of the run's lists beside them: its name in ``Head``, and how it is read.
_ITEMS: dict[type[Command], tuple[str, Callable[[str], Any]]] = {
    commands.Open: ("attempt_generation", int),
    commands.ClaimSlot: ("slot_nonce", str),
    commands.SaveSnapshot: ("snapshot_text", str),
    commands.Revise: ("same_number", revision_of),
}


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
        (schema,), (has_runs,) = (
            self._client.read(("GET", SCHEMA)),
            self._client.read(("EXISTS", RUNS)),
        )
        if (schema or has_runs) and schema != str(SCHEMA_VERSION):
            raise refusals.other_schema(self.description, schema or "none", SCHEMA_VERSION)

    def close(self) -> None:
        self._client.close()

    def history(self) -> HistoryStore:
        return RedisHistory(
            self._client, lambda uid, stream: keys_of(self._home(uid, stream), stream)[0]
        )

    # Runs by name.

    def create_run(self, name: str, stream: str, uid: str, record: str) -> records.StoredRun:
        stored = self.read_run(name, stream)
        if stored is not None:
            if (refusal := rules.refuse_elsewhere(name, stored.elsewhere)) is not None:
                raise refusal
            return stored
        self._refuse_taken(uid, stream, name)
        self._client.read(("SETNX", SCHEMA, SCHEMA_VERSION))
        self._run_script(commands.Create(uid, stream, name, record), uid)
        # Two keys in two slots of a cluster: a run exists once its name leads to it.
        self._client.read(("HSETNX", RUNS, f"{name}/{stream}", uid))
        stored = self.read_run(name, stream)
        if stored is None:
            raise LedgerError(
                f"{self.description} lost run {name!r}, stream {stream}, right after it was created."
            )
        if stored.uid != uid and self._home(stored.uid, stream) != uid:  # another server came first
            self._client.read(("DEL", keys_of(uid, stream)[0]))
        return stored

    def read_run(self, name: str, stream: str) -> records.StoredRun | None:
        (home,) = self._client.read(("HGET", RUNS, f"{name}/{stream}"))
        if home is None:
            return None
        run, opening, *counters = self._client.run_script("read", keys_of(home, stream), ["", ""])
        fields = paired(run)
        self._require(fields, name, stream)
        return redis_rows.stored_run(fields, opening, *map(paired, counters))

    def read_all(self, name: str, stream: str) -> records.RunContents | None:
        (home,) = self._client.read(("HGET", RUNS, f"{name}/{stream}"))
        if home is None:
            return None
        answers = self._client.read(*redis_rows.reading_all(home, stream))
        self._require(answers[0], name, stream)
        return redis_rows.run_contents(answers)

    def _require(self, fields: dict[str, str], name: str, stream: str) -> None:
        if not fields:
            raise LedgerError(
                f"{self.description} names run {name!r}, stream {stream}, but does not hold it: keys were lost. "
                f"Restore them, or remove its field from {RUNS} and resume from a trainer's checkpoint."
            )

    def store_faults(self) -> Sequence[str]:
        homes, uids = self._client.read(("HGETALL", RUNS), ("HGETALL", UIDS))
        known = {
            key for name, home in homes.items() for key in keys_of(home, name.rpartition("/")[2])
        }
        endings = tuple(ending for ending in redis_rows.KEYS_OF_A_RUN if ending)
        keys = [
            key
            for key in self._client.keys("tokenloom:{*")
            if key.endswith(endings) or key.count(":") == 2
        ]
        orphans = [key for key in keys if key not in known]
        faults = [
            f"key {key} is of no run: {RUNS} lost its field (redis-cli HSET {RUNS} NAME/STREAM U), or a restore was "
            f"interrupted, and it may go (redis-cli DEL '{key}')"
            for key in sorted(orphans)
        ]
        for uid, home in uids.items():
            if keys_of(home, uid.rpartition("/")[2])[0] not in known:
                faults.append(
                    f"uid {uid} leads to no run: remove it (redis-cli HDEL {UIDS} '{uid}')"
                )
        for field, home in homes.items():
            faults += self._disagreements(field, home)
        return faults

    def _disagreements(self, field: str, home: str) -> list[str]:
        """Where a run's keys say the same thing twice, and differently."""
        key = keys_of(home, stream := field.rpartition("/")[2])[0]
        twice = ("HGETALL", f"{key}:attempts"), ("ZRANGE", f"{key}:journal", 0, -1)
        *answers, attempts, journal = self._client.read(
            *redis_rows.reading_all(home, stream), *twice
        )
        contents = redis_rows.run_contents(answers)
        compared = (
            (RUNS, field, f"{contents.run.name}/{contents.run.stream}"),
            (UIDS, home, self._home(contents.run.uid, stream)),
            (
                "attempts",
                attempts,
                {each.attempt: str(each.generation) for each in contents.openings},
            ),
            (
                "journal",
                journal,
                [member_of(each.generation, each.sample_index) for each in contents.journal],
            ),
        )
        remedy = "Restore the run from a backup (tokenloom ledger restore --replace)"
        return [
            f"{key}: {name} contradicts other keys. {remedy}"
            for name, one, other in compared
            if one != other
        ]

    def run_names(self) -> Sequence[tuple[str, str]]:
        (fields,) = self._client.read(("HKEYS", RUNS))
        return sorted((field.rpartition("/")[0], field.rpartition("/")[2]) for field in fields)

    # Writes: a script each.

    def execute(self, command: Command) -> int:
        refusal = refuse_integers(command)
        if refusal is not None:
            raise refusal
        if isinstance(command, commands.Import):
            return self._import(command)
        home = self._home(command.uid, command.stream)
        answer = (
            self._adopt(command, home)
            if isinstance(command, commands.Adopt)
            else self._run_script(command, home)
        )
        self._homes[command.uid, command.stream] = home
        return answer

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        if (
            len(some) == 1
            or len({each.verb for each in some}) > 1
            or any(map(refuse_integers, some))
        ):
            return super().execute_all(some)
        calls = [
            (keys_of(self._home(each.uid, each.stream), each.stream), self._sent_of(each))
            for each in some
        ]
        replies = self._client.run_script_often(some[0].verb, calls)
        return [_answer_of(command, reply) for command, reply in zip(some, replies, strict=True)]

    def _run_script(self, command: Command, home: str, *more: str) -> int:
        """What the command's script answers. Where it refuses, raises what the rules say of the run as it saw it."""
        arguments = self._sent_of(command, *more)
        answer = _answer_of(
            command, self._client.run_script(command.verb, keys_of(home, command.stream), arguments)
        )
        if isinstance(answer, TokenloomError):
            raise answer
        return answer

    def _sent_of(self, command: Command, *more: str) -> list[Any]:
        epoch, known = (
            (command.epoch, command.known_changes)
            if isinstance(command, LeaderCommand)
            else ("", "")
        )
        return [command.uid, epoch, *_arguments(command, self._clock), *more, known]

    def _adopt(self, command: commands.Adopt, home: str) -> int:
        """Gives a run its new uid, in three steps: that uid's key and the run's may lie in two slots of a cluster."""
        self._run_script(command, home, "check")
        if command.new_uid == command.uid:
            return 0
        self._announce(home, command.stream, command.new_uid)
        return self._run_script(command, home, "do")

    def _import(self, command: commands.Import) -> int:
        """Writes a run's keys as a whole, while nobody writes the first of them; then its name leads to them."""
        run = command.contents.run
        field = f"{run.name}/{run.stream}"
        (named,) = self._client.read(("HGET", RUNS, field))
        self._refuse_taken(run.uid, run.stream, run.name)
        home = named or run.uid
        if named is not None:
            self._announce(home, run.stream, run.uid)
        epoch = 0

        def requests(fields: dict[str, str], now: float) -> list[tuple[Any, ...]]:
            nonlocal epoch
            # What no name leads to was left by an import that was interrupted.
            head = (
                _head(command, str(now), [*fields], [*fields.values()])
                if named is not None
                else None
            )
            decision = decide(head, command)
            if not isinstance(decision, Writes):
                raise decision
            assert decision.contents is not None
            epoch = decision.answer
            return redis_rows.writing_all(home, decision.contents)

        self._client.change(keys_of(home, run.stream)[0], requests)
        self._client.read(("SETNX", SCHEMA, SCHEMA_VERSION))
        _, present = self._client.read(("HSETNX", RUNS, field, home), ("HGET", RUNS, field))
        if present != home:
            raise refusals.is_there(command, present, 0)
        return epoch

    # A run's lists.

    def openings(self, uid: str, stream: str) -> Sequence[records.Opening]:
        (texts,) = self._read(uid, stream, ("HVALS", ":openings"))
        return redis_rows.openings_of(texts)

    def journal(
        self, uid: str, stream: str, generation: int, at_most: int
    ) -> records.JournalEntry | None:
        while True:
            newest = (
                f"[{member_of(generation, at_most)}",
                f"[{member_of(generation, 0)}",
                "LIMIT",
                0,
                1,
            )
            (members,) = self._read(uid, stream, ("ZREVRANGEBYLEX", ":journal", *newest))
            if not members:
                return None
            (state,) = self._read(uid, stream, ("HGET", ":states", members[0]))
            if state is not None:  # thinned away between the two
                return records.JournalEntry(
                    generation=generation,
                    sample_index=int(members[0].partition(":")[2]),
                    state=state,
                )

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        entries, size_bytes = self._read(
            uid, stream, ("ZCARD", ":journal"), ("HGET", "", "journal_bytes")
        )
        return int(entries), int(size_bytes or 0)

    def revisions(self, uid: str, stream: str) -> Sequence[records.StoredRevision]:
        (texts,) = self._read(uid, stream, ("LRANGE", ":revisions", 0, -1))
        return [revision_of(text) for text in texts]

    def snapshots(self, uid: str, stream: str) -> Sequence[records.StoredSnapshot]:
        (texts,) = self._read(uid, stream, ("HVALS", ":snapshots"))
        return sorted(
            map(snapshot_of, texts), key=lambda each: (-each.saved_at, -each.sample_index, each.id)
        )

    def snapshot_count(self, uid: str, stream: str) -> int:
        return int(self._read(uid, stream, ("HLEN", ":snapshots"))[0])

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> records.StoredSnapshot | None:
        (text,) = self._read(uid, stream, ("HGET", ":snapshots", snapshot_id))
        return None if text is None else snapshot_of(text)

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
        case commands.Open(opening=opening, committed=committed):
            mark = rules.opening_mark(command.epoch, opening, committed)
            entry = member_of(opening.generation, opening.start_index), opening.start_state
            revision = json_of(command.revision) if command.revision is not None else ""
            arguments = (
                opening.generation,
                opening.attempt,
                mark,
                json_of(opening),
                *entry,
                revision,
            )
            return (*arguments, *redis_rows.committed_arguments(committed, clock()))
        case commands.Commit(generation=generation, committed=committed):
            member = member_of(generation, committed.sample_index) if command.journal else ""
            return (
                generation,
                member,
                command.known_index,
                *redis_rows.committed_arguments(committed, clock()),
            )
        case commands.Revise(revision=revision, generation=generation):
            return (revision.number, revision.sample_index, json_of(revision), generation)
        case commands.SaveSnapshot(snapshot=snapshot):
            return (snapshot.id, snapshot.text, json_of(snapshot))
    names = [field.name for field in fields(command) if field.name not in _SENT_BY_ALL]
    values = [getattr(command, name) for name in names]
    slack = (records.CLOCK_SLACK_S,) if isinstance(command, commands.Acquire) else ()
    return ["" if value is None else value for value in (*values, *slack)]


def _head(
    command: Command,
    now: str,
    names: Sequence[str],
    values: Sequence[str | None],
    newest_revision: str | None = None,
    item: str | None = None,
) -> Head | None:
    """What ``refused`` of ``lua/run.lua`` answers; None where there is no such run."""
    run = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if not run:
        return None
    fields: dict[str, Any] = {name: int(run.get(name, 0)) for name in _INTEGERS}
    fields |= {name: run.get(name, "") for name in _TEXTS}
    if newest_revision is not None:
        fields["newest_revision"] = revision_of(newest_revision)
    if item is not None:
        name, read = _ITEMS[type(command)]
        fields[name] = read(item)
    return Head(now=float(now), lease=lease_of(run), **fields)

"""The ledger in Redis. Each write is one Lua script (``lua/``), so it happens as a whole or not at all.

What a plain client finds (``redis-cli``), for a run with the id ``U`` and the stream ``train``:

==================================  =======  ==================================================================
key                                 type     holds
==================================  =======  ==================================================================
``tokenloom:runs``                  hash     ``name/stream`` → U
``tokenloom:uids``                  hash     ``uid/stream`` → U, for runs that took a uid from elsewhere (adopt)
``tokenloom:{U}:train``             hash     ``name stream uid record epoch pin journal_bytes``; the lease:
                                             ``lease_holder lease_acquired_at lease_lapses_at lease_s heard_at``;
                                             the generation:
                                             ``generation parent attempt world_size batch_size group_steps
                                             start_index opened_at opening_mark``; the committed state: ``sample_index
                                             total_tokens digest state committed_at``
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

The braces are part of the keys: they keep a run's keys in one slot of a cluster. U is the uid that the
run was created with, and stays in the keys when the run takes another uid; ``tokenloom:runs`` leads to
it either way. For example::

    redis-cli HGET tokenloom:runs wiki-and-code/train
    redis-cli HGETALL 'tokenloom:{…}:train:tokens'

Nothing here expires, and nothing but ``open`` and ``commit`` writes the committed state and counters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tokenloom_server.errors import LedgerError
from tokenloom_server.ledger import refusals
from tokenloom_server.ledger.base import (
    CLOCK_SLACK_S,
    Commit,
    Counters,
    JournalEntry,
    Lease,
    Opening,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)
from tokenloom_server.ledger.redis_client import RedisClient

RUNS = "tokenloom:runs"
UIDS = "tokenloom:uids"

#: In the order that ``lua/run.lua`` names them.
KEYS_OF_A_RUN = (
    "", ":samples", ":rows", ":tokens", ":openings", ":attempts", ":slots", ":journal", ":states", ":snapshots",
    ":revisions",
)  # fmt: skip


class RedisLedger:
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

    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        found = self.read_run(name, stream)
        if found is not None:
            return found
        self._refuse_taken(uid, stream, name)
        answer = self._client.run_script("create", keys_of(uid, stream), [uid, "", name, stream, record])
        if answer[0] == "taken":
            raise refusals.uid_taken(uid, stream, name, answer[1])
        # Two keys in two slots of a cluster: a run exists once its name leads to it.
        self._client.read(("HSETNX", RUNS, f"{name}/{stream}", uid))
        found = self.read_run(name, stream)
        if found is None:
            raise LedgerError(f"{self.description} lost run {name!r}, stream {stream}, right after it was created.")
        if found.uid != uid and self._home(found.uid, stream) != uid:  # another server came first
            self._client.read(("DEL", keys_of(uid, stream)[0]))
        return found

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
            committed = Commit(
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
            opening=Opening(**json.loads(opening)) if opening else None,
            committed=committed,
            committed_at=float(fields["committed_at"]) if committed else None,
            pin=fields.get("pin"),
            lease=_lease(fields),
        )

    def run_names(self) -> Sequence[tuple[str, str]]:
        (fields,) = self._client.read(("HKEYS", RUNS))
        return sorted((field.rpartition("/")[0], field.rpartition("/")[2]) for field in fields)

    def acquire(self, uid: str, stream: str, holder: str, lease_s: float, above: int = 0) -> int:
        (epoch,) = self._write("acquire", uid, stream, "", holder, lease_s, above, CLOCK_SLACK_S)
        return int(epoch)

    def renew(
        self,
        uid: str,
        stream: str,
        epoch: int,
        holder: str,
        lease_s: float,
        heard_at: float | None,
        generation: int,
        known: int,
    ) -> None:
        heard = "" if heard_at is None else heard_at
        self._write("renew", uid, stream, epoch, generation, known, lease_s, heard, holder)

    def release(self, uid: str, stream: str, epoch: int) -> None:
        self._write("release", uid, stream, epoch)

    def adopt(self, uid: str, stream: str, epoch: int, new_uid: str) -> None:
        self._write("adopt", uid, stream, epoch, new_uid, "may I")
        if new_uid != uid:
            self._announce(uid, stream, new_uid)
            self._write("adopt", uid, stream, epoch, new_uid, "do")

    def open(self, uid: str, stream: str, epoch: int, opening: Opening, committed: Commit) -> None:
        refusals.check_commit(uid, stream, committed)
        self._write(
            "open",
            uid,
            stream,
            epoch,
            opening.generation,
            opening.attempt,
            refusals.opening_mark(epoch, opening, committed),
            _json(asdict(opening)),
            _member(opening.generation, opening.start_index),
            opening.start_state,
            opening.parent,
            opening.world_size,
            opening.batch_size,
            opening.group_steps,
            opening.start_index,
            opening.opened_at,
            *self._committed(committed),
        )

    def claim_slot(self, uid: str, stream: str, epoch: int, generation: int, rank: int, nonce: str) -> None:
        self._write("claim_slot", uid, stream, epoch, generation, rank, nonce)

    def commit(
        self, uid: str, stream: str, epoch: int, generation: int, commit: Commit, journal: bool, known: int = 0
    ) -> int:
        refusals.check_commit(uid, stream, commit)
        member = _member(generation, commit.sample_index) if journal else ""
        (index,) = self._write("commit", uid, stream, epoch, generation, member, known, *self._committed(commit))
        return int(index)

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        (texts,) = self._read(uid, stream, ("HVALS", ":openings"))
        return sorted((Opening(**json.loads(text)) for text in texts), key=lambda opening: opening.generation)

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

    def thin_journal(self, uid: str, stream: str, epoch: int) -> None:
        self._write("thin_journal", uid, stream, epoch)

    def pin(self, uid: str, stream: str, epoch: int, pin: str | None) -> None:
        self._write("pin", uid, stream, epoch, *([] if pin is None else [pin]))

    def revise(self, uid: str, stream: str, epoch: int, revision: StoredRevision) -> None:
        refusals.check_revision(uid, stream, revision)
        self._write("revise", uid, stream, epoch, revision.number, revision.sample_index, _json(asdict(revision)))

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        (texts,) = self._read(uid, stream, ("LRANGE", ":revisions", 0, -1))
        return [StoredRevision(**json.loads(text)) for text in texts]

    def drop_revisions(self, uid: str, stream: str, epoch: int, number: int) -> None:
        self._write("drop_revisions", uid, stream, epoch, number)

    def save_snapshot(self, uid: str, stream: str, snapshot: StoredSnapshot) -> None:
        (found,) = self._write("save_snapshot", uid, stream, "", snapshot.id, _json(asdict(snapshot)))
        if json.loads(found)["text"] != snapshot.text:
            raise refusals.snapshot_differs(uid, stream, snapshot.id)

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        (texts,) = self._read(uid, stream, ("HVALS", ":snapshots"))
        found = (StoredSnapshot(**json.loads(text)) for text in texts)
        return sorted(found, key=lambda each: (-each.saved_at, -each.sample_index, each.id))

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None:
        (text,) = self._read(uid, stream, ("HGET", ":snapshots", snapshot_id))
        return None if text is None else StoredSnapshot(**json.loads(text))

    def close(self) -> None:
        self._client.close()

    def _write(self, script: str, uid: str, stream: str, epoch: int | str, *arguments: str | float) -> list[Any]:
        """What the script answers behind its 'ok'."""
        home = self._home(uid, stream)
        status, *answer = self._client.run_script(script, keys_of(home, stream), [uid, epoch, *arguments])
        match status:
            case "ok":
                self._homes[uid, stream] = home
                return answer
            case "missing" if epoch != "":
                raise refusals.gone(uid, stream)
            case "missing":
                raise refusals.no_such_run(uid, stream)
            case "held":
                raise refusals.lease_held(uid, stream, answer[0], float(answer[1]), float(answer[2]))
            case "rolled_back":
                known = int(arguments[1] if script == "renew" else arguments[2])
                raise refusals.rolled_back(uid, stream, int(answer[0]), int(answer[1]), int(arguments[0]), known)
            case "renamed":
                raise refusals.renamed(uid, stream, answer[0])
            case "not_leader":
                raise refusals.not_leader(uid, stream, int(answer[0]), int(epoch))
            case "twice":
                raise refusals.given_out_twice(answer[1], int(epoch), answer[0])
            case "fenced":
                raise refusals.fenced(uid, stream, int(answer[0]), int(arguments[0]))
            case "order":
                raise refusals.order_mismatch(uid, stream, int(answer[0]), answer[1], str(arguments[5]))
            case "used":
                raise refusals.attempt_used(uid, stream, str(arguments[1]), int(answer[0]))
            case "generation":
                raise refusals.generation_too_low(uid, stream, int(answer[0]), int(arguments[0]))
            case "slot":
                raise refusals.slot_taken(uid, stream, int(arguments[0]), int(arguments[1]))
            case "revision":
                raise refusals.revision_number(uid, stream, int(answer[0]), int(arguments[0]))
            case "too_early":
                raise refusals.revision_too_early(uid, stream, int(answer[0]), int(answer[1]), int(arguments[1]))
            case "opened":
                raise refusals.opened_already(uid, stream, int(answer[0]), str(arguments[0]))
        raise AssertionError(f"script {script} answered {status!r}")

    def _read(self, uid: str, stream: str, *commands: tuple[str | int, ...]) -> list[Any]:
        """Answers to commands whose second word is a key's ending; raises where the uid is not the run's."""
        key = keys_of(self._home(uid, stream), stream)[0]
        placed = [(command[0], f"{key}{command[1]}", *command[2:]) for command in commands]
        found, *answers = self._client.read(("HGET", key, "uid"), *placed)
        if found is None:
            raise refusals.no_such_run(uid, stream)
        if found != uid:
            raise refusals.renamed(uid, stream, found)
        return answers

    def _committed(self, commit: Commit) -> list[str | float]:
        """As ``put_committed`` of ``lua/run.lua`` takes it."""
        counters = commit.counters.values()
        return [
            commit.sample_index,
            commit.total_tokens,
            commit.digest,
            commit.state,
            self._clock(),
            len(commit.counters),
            *commit.counters,
            *(each.samples for each in counters),
            *(each.rows for each in counters),
            *(each.tokens for each in counters),
        ]

    # Uids. Keys carry the one that the run was created with; ``tokenloom:uids`` knows the others.

    def _home(self, uid: str, stream: str) -> str:
        """The id in a run's keys; the uid itself where there is no such run."""
        home = self._homes.get((uid, stream))
        if home is not None:
            return home
        if self._uid_at(uid, stream) == uid:
            return uid
        (adopted,) = self._client.read(("HGET", UIDS, f"{uid}/{stream}"))
        return uid if adopted is None else str(adopted)

    def _uid_at(self, home: str, stream: str) -> str | None:
        (found,) = self._client.read(("HGET", keys_of(home, stream)[0], "uid"))
        return found if found is None else str(found)

    def _refuse_taken(self, uid: str, stream: str, name: str) -> None:
        home = self._home(uid, stream)
        holder, found = self._client.read(*(("HGET", keys_of(home, stream)[0], field) for field in ("name", "uid")))
        if found == uid and holder != name:
            raise refusals.uid_taken(uid, stream, name, holder)

    def _announce(self, uid: str, stream: str, new_uid: str) -> None:
        """Makes ``new_uid`` lead to the run's keys, before the run takes it: until then it leads nowhere."""
        home = self._home(uid, stream)
        if new_uid == home:
            return
        (name,) = self._client.read(("HGET", keys_of(home, stream)[0], "name"))
        self._refuse_taken(new_uid, stream, name)
        field = f"{new_uid}/{stream}"
        _, found = self._client.read(("HSETNX", UIDS, field, home), ("HGET", UIDS, field))
        if found != home:
            (holder,) = self._client.read(("HGET", keys_of(found, stream)[0], "name"))
            raise refusals.uid_taken(new_uid, stream, name, holder)


def keys_of(home: str, stream: str) -> list[str]:
    """All keys of a run, as every script gets them."""
    return [f"tokenloom:{{{home}}}:{stream}{ending}" for ending in KEYS_OF_A_RUN]


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


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

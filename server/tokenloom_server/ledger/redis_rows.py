"""A run in Redis: its keys, and from what they hold to records, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from tokenloom_server.ledger import records
from tokenloom_server.ledger.base import KINDS, HistoryEntry, HistoryStore, Kind
from tokenloom_server.ledger.redis_client import RedisClient

#: In the order that ``lua/run.lua`` names them.
KEYS_OF_A_RUN = (
    "", ":samples", ":rows", ":tokens", ":openings", ":attempts", ":slots", ":journal", ":states", ":snapshots",
    ":revisions",
)  # fmt: skip

#: Fields of a run's own key that a ``StoredRun`` has by the same names; empty ones are left out.
_FIELDS = (
    *(
        "name",
        "stream",
        "uid",
        "record",
        "epoch",
        "committed_at",
        "pin",
        "revision_changes",
        "closed_generation",
    ),
    "elsewhere",
)

_COUNTED = ("samples", "rows", "tokens")


def keys_of(home: str, stream: str) -> list[str]:
    """All keys of a run, as every script gets them."""
    return [f"tokenloom:{{{home}}}:{stream}{ending}" for ending in KEYS_OF_A_RUN]


def opening_of(text: str) -> records.Opening:
    return records.Opening(**json.loads(text))


def openings_of(texts: Iterable[str]) -> list[records.Opening]:
    """Oldest first."""
    return sorted(map(opening_of, texts), key=lambda opening: opening.generation)


def revision_of(text: str) -> records.StoredRevision:
    return records.StoredRevision(**json.loads(text))


def snapshot_of(text: str) -> records.StoredSnapshot:
    return records.StoredSnapshot(**json.loads(text))


def json_of(record: records.Opening | records.StoredRevision | records.StoredSnapshot) -> str:
    return json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":"))


def member_of(generation: int, sample_index: int) -> str:
    return f"{generation:016d}:{sample_index:016d}"


def lease_of(fields: Mapping[str, str]) -> records.Lease | None:
    if "lease_holder" not in fields:
        return None
    heard_at = fields.get("heard_at")
    return records.Lease(
        holder=fields["lease_holder"],
        acquired_at=float(fields["lease_acquired_at"]),
        lapses_at=float(fields["lease_lapses_at"]),
        lasts_s=float(fields["lease_s"]),
        heard_at=float(heard_at) if heard_at else None,
    )


def paired(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def stored_run(
    fields: Mapping[str, str], opening: str | None, *counters: Mapping[str, str]
) -> records.StoredRun:
    """``fields``: of the run's own key; then its present opening, and its samples, rows and tokens by spec."""
    committed, (samples, rows, tokens) = None, counters
    if "sample_index" in fields:
        committed = records.CommittedState(
            sample_index=int(fields["sample_index"]),
            total_tokens=int(fields["total_tokens"]),
            digest=fields["digest"],
            state=fields["state"],
            counters={
                spec: records.Counters(
                    samples=int(count), rows=int(rows[spec]), tokens=int(tokens[spec])
                )
                for spec, count in samples.items()
            },
        )
    texts: dict[str, Any] = {name: fields[name] for name in ("name", "stream", "uid", "record")}
    return records.StoredRun(
        **texts,
        epoch=int(fields["epoch"]),
        opening=opening_of(opening) if opening else None,
        committed=committed,
        committed_at=float(fields["committed_at"]) if committed else None,
        pin=fields.get("pin"),
        lease=lease_of(fields),
        elsewhere=fields.get("elsewhere", ""),
        revision_changes=int(fields.get("revision_changes", 0)),
        closed_generation=int(fields.get("closed_generation", 0)),
    )


def reading_all(home: str, stream: str) -> list[tuple[str | int, ...]]:
    """The requests whose answers ``run_contents`` takes."""
    key = keys_of(home, stream)[0]
    hashes = ("", ":samples", ":rows", ":tokens", ":openings", ":slots", ":states", ":snapshots")
    return [
        *(("HGETALL", f"{key}{ending}") for ending in hashes),
        ("LRANGE", f"{key}:revisions", 0, -1),
    ]


def run_contents(answers: Sequence[Any]) -> records.RunContents:
    """All of a run."""
    fields, samples, rows, tokens, openings, slots, states, snapshots, revisions = answers
    return records.RunContents(
        run=stored_run(fields, openings.get(fields["generation"]), samples, rows, tokens),
        openings=openings_of(openings.values()),
        slots={rank: slots[str(rank)] for rank in sorted(map(int, slots))},
        journal=[
            records.JournalEntry(
                generation=int(member[:16]), sample_index=int(member[17:]), state=state
            )
            for member, state in sorted(states.items())
        ],
        revisions=[revision_of(text) for text in revisions],
        snapshots=sorted(
            map(snapshot_of, snapshots.values()),
            key=lambda each: (each.saved_at, each.sample_index, each.id),
        ),
    )


def writing_all(home: str, contents: records.RunContents) -> list[tuple[Any, ...]]:
    """The requests that write a run, in place of all that is there of it."""
    run, committed = contents.run, contents.run.committed
    states = {
        member_of(entry.generation, entry.sample_index): entry.state for entry in contents.journal
    }
    fields = {name: getattr(run, name) for name in _FIELDS if getattr(run, name) not in (None, "")}
    fields["generation"] = run.opening.generation if run.opening is not None else 0
    fields["journal_bytes"] = sum(len(state.encode()) for state in states.values())
    counters = committed.counters if committed is not None else {}
    if committed is not None:
        fields |= {
            name: getattr(committed, name)
            for name in ("sample_index", "total_tokens", "digest", "state")
        }
    hashes: dict[str, Mapping[Any, Any]] = {
        "": fields,
        **{
            f":{name}": {spec: getattr(counters[spec], name) for spec in counters}
            for name in _COUNTED
        },
        ":openings": {opening.generation: json_of(opening) for opening in contents.openings},
        ":attempts": {opening.attempt: opening.generation for opening in contents.openings},
        ":slots": contents.slots,
        ":states": states,
        ":snapshots": {each.id: json_of(each) for each in contents.snapshots},
    }
    keys = dict(zip(KEYS_OF_A_RUN, keys_of(home, run.stream), strict=True))
    requests: list[tuple[Any, ...]] = [("DEL", *keys.values())]
    requests += [
        ("HSET", keys[end], *chain(*pairs.items())) for end, pairs in hashes.items() if pairs
    ]
    requests += [("ZADD", keys[":journal"], 0, member) for member in states]
    return [
        *requests,
        *(("RPUSH", keys[":revisions"], json_of(each)) for each in contents.revisions),
    ]


def committed_arguments(commit: records.CommittedState, committed_at: float) -> list[str | float]:
    """As ``put_committed`` of ``lua/run.lua`` takes it."""
    by_kind = [getattr(each, name) for name in _COUNTED for each in commit.counters.values()]
    own = (commit.sample_index, commit.total_tokens, commit.digest, commit.state, committed_at)
    return [*own, len(commit.counters), *commit.counters, *by_kind]


# The history of the runs of a Redis ledger, in hashes beside the run's own keys.
#
# ``tokenloom:{U}:train:history:points`` (and ``events``, ``frequent``, ``mark``) has an entry for each field
# ``number:time``. They lie in the run's slot of a cluster, so that one script compares the server epoch and writes.


class RedisHistory(HistoryStore):
    """See ``HistoryStore``."""

    def __init__(self, client: RedisClient, run_key: Callable[[str, str], str]) -> None:
        """``run_key``: of a (uid, stream)."""
        self._client = client
        self._run_key = run_key

    def write(
        self,
        uid: str,
        stream: str,
        epoch: int,
        put: Sequence[HistoryEntry],
        drop: Sequence[HistoryEntry],
    ) -> bool:
        arguments: list[str | int] = [uid, epoch]
        for kind in KINDS:
            texts = [
                word for entry in put if entry.kind == kind for word in (_field(entry), entry.text)
            ]
            fields = [_field(entry) for entry in drop if entry.kind == kind]
            arguments += [len(texts), *texts, len(fields), *fields]
        run = self._run_key(uid, stream)
        keys = [run, *(_key(run, kind) for kind in KINDS)]
        return bool(self._client.run_script("record", keys, [*arguments, 0])[0])

    def entries(self, uid: str, stream: str, *kinds: Kind) -> list[HistoryEntry]:
        run = self._run_key(uid, stream)
        names = self._client.read(*(("HKEYS", _key(run, kind)) for kind in kinds))
        entries = [
            _entry(kind, field)
            for kind, fields in zip(kinds, names, strict=True)
            for field in fields
        ]
        return sorted(entries, key=lambda entry: entry.number)

    def read(self, uid: str, stream: str, wanted: Sequence[HistoryEntry]) -> list[HistoryEntry]:
        run, entries = self._run_key(uid, stream), []
        for kind in {entry.kind for entry in wanted}:
            of_kind = [entry for entry in wanted if entry.kind == kind]
            (texts,) = self._client.read(("HMGET", _key(run, kind), *map(_field, of_kind)))
            entries += [
                entry._replace(text=text)
                for entry, text in zip(of_kind, texts, strict=True)
                if text is not None
            ]
        return sorted(entries, key=lambda entry: entry.number)

    def close(self) -> None:
        """The ledger closes its connections."""


def _key(run: str, kind: Kind) -> str:
    return f"{run}:history:{kind}"


def _field(entry: HistoryEntry) -> str:
    return f"{entry.number}:{entry.time!r}"


def _entry(kind: Kind, field: str) -> HistoryEntry:
    number, _, time = field.partition(":")
    return HistoryEntry(kind, int(number), float(time))

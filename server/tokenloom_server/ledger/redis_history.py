"""The history of the runs of a Redis ledger, in hashes beside the run's own keys.

``tokenloom:{U}:train:history:points`` (and ``events``, ``frequent``, ``mark``) has an entry for each field
``number:time``. They lie in the run's slot of a cluster, so that one script compares the server epoch and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenloom_server.ledger.history import KINDS, HistoryEntry, HistoryStore, Kind
from tokenloom_server.ledger.redis_client import RedisClient


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

"""``ledger check``: each fault that is put into what servers wrote is named, but for those that its page lists."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from support.redis_server import RedisServer
from tokenloom_proto.seal import canonical
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Acquire, Import
from tokenloom_server.ledger.records import RunContents
from tokenloom_server.ledger.redis import RUNS, UIDS, RedisLedger
from tokenloom_server.ledger.redis_rows import keys_of
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.ledger.sqlite_rows import OF_A_RUN
from tokenloom_tools.ledger import run_faults, store_faults

from tests.simulation.world import World

#: Its ledger has skips, of which one lies before an earlier one, a change in force, a snapshot, several generations,
#: and commits after the last state.
WORLD = 262
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
#: Names in Redis that SQLite has otherwise.
AS_IN_SQLITE = {
    **{f"lease_{name}": name for name in ("holder", "acquired_at", "lapses_at")},
    "lease_s": "lasts_s",
    "uids": "former_uids",
}
#: What is damaged, how, and how it is mended again.
Damage = tuple[str, Callable[[], object], Callable[[], object]]


@cache
def lived() -> RunContents:
    world = World(WORLD)
    world.run()
    contents = world.ledger.read_all("world", "train")
    assert contents is not None
    saved = contents.snapshots[0]
    pin = canonical(
        {"snapshot": saved.text, "sample_index": saved.sample_index, "digest": "", "skips": None}
    )
    starts = {opening.start_state for opening in contents.openings}
    journal = [entry for entry in contents.journal if entry.state in starts]
    return replace(
        contents, run=replace(contents.run, pin=pin), journal=[*journal, contents.journal[-1]]
    )


def filled(ledger: Ledger) -> Ledger:
    """The run with all that a run may have, a former uid among it."""
    ledger.create_run("world", "train", "uid-0", "{}")
    ledger.execute(Import("uid-1", "train", lived(), replace=True))
    ledger.execute(Acquire("uid-1", "train", "server", 9.0))
    assert faults_of(ledger) == []
    return ledger


def faults_of(ledger: Ledger) -> list[str]:
    """What the command prints."""
    return [
        *store_faults(ledger),
        *(fault for name in ledger.run_names() for fault in run_faults(ledger, *name)),
    ]


def damaged(value: Any) -> Iterator[Any]:
    """A value that was cut, is of another run, or lies elsewhere."""
    if isinstance(value, str) and not re.fullmatch(r"-?\d+(\.\d+)?", value):
        yield from {value[: len(value) // 2], f"x{value}"} - {value}
    elif value is not None:
        number = float(value) if "." in str(value) else int(value)
        yield from (number + 1, -1 - number)
        yield "x"


def unseen(ledger: Ledger, damages: Iterator[Damage]) -> set[str]:
    """What was damaged, of which the check says nothing; each is mended again."""
    names = set()
    for name, damage, mend in damages:
        damage()
        names |= set() if faults_of(ledger) else {name}
        mend()
    assert faults_of(ledger) == []
    return names


def of_page() -> set[str]:
    """What the page says that the check does not see."""
    section = (
        PAGE.read_text(encoding="utf-8")
        .partition("**What it does not see.**")[2]
        .partition("\n## ")[0]
    )
    return set(re.findall(r"`([a-z_]+)`", section))


def test_each_fault_in_a_ledger_is_named_but_for_those_that_the_page_lists(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    path, found = tmp_path / "ledger.db", set()
    with (
        closing(filled(SqliteLedger(path))) as ledger,
        closing(sqlite3.connect(path)) as connection,
    ):
        connection.execute("PRAGMA synchronous = OFF")
        found |= unseen(ledger, _in_tables(connection))
    with redis_server.client() as client:
        client.flushall()
        with closing(filled(RedisLedger(redis_server.url()))) as ledger:
            found |= {AS_IN_SQLITE.get(name, name) for name in unseen(ledger, _in_keys(client))}
    assert sorted(found) == sorted(of_page())


def _in_tables(connection: sqlite3.Connection) -> Iterator[Damage]:
    for table in ("runs", "former_uids", *OF_A_RUN):
        cursor = connection.execute(f"SELECT * FROM {table}")
        columns, rows = [column for column, *_ in cursor.description], cursor.fetchall()
        assert rows, table
        into = f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})"

        def put(rows: list[Any], table: str = table, into: str = into) -> None:
            connection.execute(f"DELETE FROM {table}")
            connection.executemany(into, rows)
            connection.commit()

        mend = partial(put, rows)
        yield from ((table, partial(put, left), mend) for left in (rows[1:], rows[:-1]))
        *others, last = rows
        for place, column in enumerate(columns):
            for value in damaged(last[place]):
                # The number of a row has one type, and in the journal it leads nowhere.
                if (column, value) not in (("id", "x"), ("run", "x")) and (table, column) != (
                    "journal",
                    "id",
                ):
                    row = (*last[:place], value, *last[place + 1 :])
                    yield column, partial(put, [*others, row]), mend


def _in_keys(client: Any) -> Iterator[Damage]:
    for key in (RUNS, UIDS, *keys_of("uid-0", "train")):
        ending, text, kind = key.rpartition(":")[2], client.dump(key), client.type(key)
        assert text is not None, key
        mend = partial(client.restore, key, 0, text, replace=True)
        yield ending, partial(client.delete, key), mend
        if kind == "zset":
            yield ending, partial(client.zpopmax, key), mend
            continue
        is_hash = kind == "hash"
        values = client.hgetall(key) if is_hash else dict(enumerate(client.lrange(key, 0, -1)))
        for field, value in [*values.items()][None if ending == "train" else -2 :]:
            name, put = (
                (field if ending == "train" else ending),
                partial(client.hset if is_hash else client.lset, key, field),
            )
            if is_hash:
                yield name, partial(client.hdel, key, field), mend
            yield from ((name, partial(put, wrong), mend) for wrong in damaged(value))
            record = json.loads(value) if ending in ("openings", "snapshots", "revisions") else {}
            for inner, item in record.items():
                yield from (
                    (inner, partial(put, canonical({**record, inner: wrong})), mend)
                    for wrong in damaged(item)
                )

"""What Tokenloom writes and shows now, to the letter: ``make goldens`` writes it to ``tests/golden``.

No golden has a time, a port or a random id in it. One that changes is a change for users, or for what they have stored.
"""

from __future__ import annotations

import base64
import json
import queue
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from prometheus_client import generate_latest
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.seal import seal, unseal
from tokenloom_proto.threads import faults
from tokenloom_server.api.metrics import create_registry
from tokenloom_server.api.rest.app import create_app
from tokenloom_server.api.rest.routes import Backend
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import StoredSnapshot
from tokenloom_server.ledger.redis import RedisLedger
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_tools.cli.app import app
from tokenloom_tools.cli.serve import tool_routes
from typer.testing import CliRunner

from support.capabilities import commands as cli_commands
from support.corpora import text_rows, write_jsonl, write_txt
from support.features import MORE, latents, write_arrow
from support.ledger_data import commit_at, opening_of, revision_of
from support.memory_service import (
    ACCESS,
    RUNS_DIR,
    MemoryService,
    readers_stats,
    report_stats,
    run_stats,
    source_stats,
)
from support.redis_server import RedisServer
from support.server_process import ServerProcess

FOLDER = Path(__file__).resolve().parents[1] / "golden"
UID = "0123456789abcdef0123456789abcdef"
NOW = 1_800_000_000.0
DEADLINE_S = 120.0

DOCS, LINES = "jsonl:docs-*.jsonl:text", "txt:lines.txt:text"
_TEXT = {"seed": 7, "tokenizer": "bytes", "sequence_length": 8}
_TWO = [{"source": DOCS, "alias": "docs", "weight": 2}, {"source": LINES, "epochs": 2}]
#: Mixtures, one for each kind of state that a snapshot can hold.
MIXTURES: dict[str, dict[str, Any]] = {
    "flat": _TEXT | {"mixture": {"policy": "least_consumed", "children": _TWO}},
    "nested": _TEXT
    | {
        "labels": "shifted",
        "mixture": {
            "policy": "weighted",
            "children": [
                {"source": DOCS, "weight": 0.25},
                {
                    "policy": "round_robin",
                    "alias": "rest",
                    "weight": 0.75,
                    "children": [{"source": LINES}],
                },
            ],
        },
    },
    "shuffled": _TEXT
    | {
        "packing": "best_fit",
        "pack_window_rows": 4,
        "mixture": {
            "policy": "sequential",
            "children": [
                {"source": LINES, "shuffle": "rows", "shuffle_window_rows": 8, "epochs": 2}
            ],
        },
    },
    "phases": _TEXT
    | {
        "last_micro_step": "pad",
        "mixture": {"policy": "least_consumed", "children": _TWO},
        "phases": [
            {"until_tokens": 64},
            {"sequence_length": 16, "mixture": {"policy": "soft_sequential", "children": _TWO[1:]}},
        ],
    },
    "schedule": _TEXT
    | {
        "packing": "none",
        "mixture": {
            "policy": "schedule",
            "children": [
                {"source": DOCS, "weight": [[0, 1], [80, 0.5]]},
                {"source": LINES, "holdout": 0.2},
            ],
        },
    },
    "buckets": {
        "seed": 5,
        "batching": {"bucket_by": "aspect"},
        "global_batch_size": 4,
        "mixture": {"policy": "balance_remaining", "children": [{"source": MORE}]},
    },
}
STEPS, RANKS = 8, 2
#: Of a run in Redis: times that nothing can set.
_LEASE = ("lease_acquired_at", "lease_lapses_at")


def write_mixtures(folder: Path) -> list[Path]:
    """The files of ``MIXTURES``, and what they read."""
    write_jsonl(folder / "docs-0.jsonl", text_rows(9, 3, 8))
    write_jsonl(folder / "docs-1.jsonl", text_rows(7, 4, 8))
    write_txt(folder / "lines.txt", text_rows(24, 5, 9))
    write_arrow(folder / "more", latents(29, 2000))
    paths = []
    for run, document in MIXTURES.items():
        paths.append(folder / f"{run}.yaml")
        paths[-1].write_text(yaml.safe_dump({"run": run} | document), encoding="utf-8")
    return paths


def conversation(folder: Path) -> dict[str, str]:
    """What a server and rank 0 of 2 say to each other about each of ``MIXTURES``, the run's record, and snapshots."""
    server = ServerProcess(folder / "server", *write_mixtures(folder)).start()
    try:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = DataLoaderStub(channel)
            spoken = {run: _speak(stub, run) for run in MIXTURES}
            snapshots = {run: _snapshots(stub, run, spoken[run]) for run in MIXTURES}
            for run, said in spoken.items():
                said += _go_on(stub, run)
                snapshots[run].append(_snapshot(stub, run, -1))
    finally:
        server.terminate()
    with sqlite3.connect(server.ledger_file) as ledger:
        rows = ledger.execute("SELECT name, record FROM runs ORDER BY name").fetchall()
    ledger.close()
    records = {run: json.loads(record) for run, record in rows}
    return {
        "wire.json": _json({run: [*map(_shown, said)] for run, said in spoken.items()}),
        "snapshots.json": _json(snapshots),
        "records.json": _json(records),
    }


def _speak(stub: DataLoaderStub, run: str) -> list[Message]:
    """Both ranks join and read so many steps, one at a time; the messages of rank 0, with ``UID`` for the run's own."""
    join = [_join(run, "attempt-1", rank) for rank in range(RANKS)]
    joined = [stub.Join(request, timeout=DEADLINE_S) for request in join]
    streams = [_read(stub, request, answer) for request, answer in zip(join, joined, strict=True)]
    read = [batches for batches, _ in zip(zip(*streams, strict=True), range(STEPS), strict=False)]
    for stream in streams:
        stream.close()
    return [
        join[0],
        *(
            _with_uid(message, joined[0].run_uid)
            for message in [joined[0], *(first for first, _ in read)]
        ),
    ]


def _go_on(stub: DataLoaderStub, run: str) -> list[Message]:
    """Both ranks join anew, where the run is committed: the state there is not that of its beginning."""
    join = [_join(run, "attempt-2", rank, resume="latest", takeover=True) for rank in range(RANKS)]
    joined = [stub.Join(request, timeout=DEADLINE_S) for request in join]
    return [join[0], _with_uid(joined[0], joined[0].run_uid)]


def _join(run: str, attempt: str, rank: int, **fields: Any) -> wire.JoinRequest:
    return wire.JoinRequest(
        run=run,
        stream="train",
        rank=rank,
        world_size=RANKS,
        batch_size=0 if "batching" in MIXTURES[run] else 2,
        attempt=attempt,
        nonce=f"nonce-{rank}",
        process=f"host/1/{rank}",
        **fields,
    )


def _read(
    stub: DataLoaderStub, request: wire.JoinRequest, joined: wire.JoinResponse
) -> Iterator[wire.StreamResponse]:
    """One step for each credit; behind the last one all are acknowledged and the stream is closed."""
    said: queue.SimpleQueue[wire.StreamRequest | None] = queue.SimpleQueue()
    progress = wire.Progress(
        consumed_through=joined.start_index, credit_micro_steps=1, digest=joined.start_digest
    )
    opening = wire.StreamOpen(
        run=request.run,
        stream=request.stream,
        run_uid=joined.run_uid,
        generation=joined.generation,
        rank=request.rank,
        nonce=request.nonce,
        attempt=request.attempt,
        received_through=joined.start_index,
        received_digest=joined.start_digest,
        server_epoch=joined.server_epoch,
        document_starts=not joined.global_batch_size,
        progress=progress,
    )
    said.put(wire.StreamRequest(open=opening))
    answers = stub.Stream(iter(said.get, None), timeout=DEADLINE_S)
    try:
        for answer in answers:
            kind = answer.WhichOneof("kind")
            if kind == "heartbeat":
                continue
            answer.committed_through = 0  # it depends on how fast the ledger is
            if kind == "batches":
                (step,) = answer.batches.micro_steps
                progress = wire.Progress(
                    consumed_through=step.end_index, credit_micro_steps=1, digest=step.digest
                )
            yield answer
            if kind == "end_of_data":
                return
            said.put(wire.StreamRequest(progress=progress))
    finally:
        said.put(None)
        for _ in answers:  # until the server has taken the last word
            pass


def _snapshots(stub: DataLoaderStub, run: str, spoken: Sequence[Message]) -> list[str]:
    """Sealed at the first, a middle and the last of the steps."""
    ends = [step.end_index for said in spoken[2:] for step in said.batches.micro_steps]
    return [_snapshot(stub, run, index) for index in (ends[-1], 0, ends[len(ends) // 2])]


def _snapshot(stub: DataLoaderStub, run: str, index: int) -> str:
    """A snapshot as soon as the index is committed; -1: where the run is committed."""
    request = wire.SnapshotRequest(run=run, stream="train", sample_index=index)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            text = stub.Snapshot(request, timeout=DEADLINE_S).snapshot_json
            return seal(unseal(text) | {"run_uid": UID})
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _with_uid(message: Message, uid: str) -> Message:
    """The message with ``UID`` in place of the run's, which is as long, wherever it stands; and without the release."""
    assert len(uid) == len(UID)
    text = message.SerializeToString(deterministic=True).replace(uid.encode(), UID.encode())
    shown = type(message).FromString(text)
    if isinstance(shown, wire.JoinResponse):
        shown.ClearField("release")
    return shown


def _shown(message: Message) -> dict[str, Any]:
    def readable(value: Any, field: str = "") -> Any:
        if isinstance(value, dict):
            return {name: readable(below, name) for name, below in value.items()}
        if isinstance(value, list):
            return [readable(below, field) for below in value]
        if field in ("resume_state", "snapshot_template", "state_json"):
            return base64.b64decode(value).decode()
        return base64.b64decode(value).hex() if field == "ids" else value

    fields = readable(MessageToDict(message, preserving_proto_field_name=True))
    return {
        "message": message.DESCRIPTOR.name,
        "fields": fields,
        "bytes": message.SerializeToString(True).hex(),
    }


def openapi(_: Path) -> dict[str, str]:
    return {
        "openapi.json": _json(create_app(Backend(MemoryService(), "0"), tool_routes()).openapi())
    }


def metrics(_: Path) -> dict[str, str]:
    """A server with one run that has every figure."""
    source = source_stats(loss=2.5, last_loss=2.25)
    service = MemoryService()
    service.put(run_stats(reported=report_stats(), readers=readers_stats(), sources=[source]))
    faults.cache_clear()  # of other tests of this process
    faults()["producer"] = 0
    text = generate_latest(
        create_registry(service, version="0", access=ACCESS, folder=RUNS_DIR)
    ).decode()
    return {
        "metrics.txt": "".join(
            line for line in text.splitlines(True) if not re.match(r"(# \w+ )?process_", line)
        )
    }


def help_texts(_: Path) -> dict[str, str]:
    """``--help`` of every command, so wide that nothing is wrapped, without the frames."""
    runner, environment = CliRunner(), {"COLUMNS": "1000", "NO_COLOR": "1", "TERM": "dumb"}
    text = ""
    for path, _command in cli_commands():
        done = runner.invoke(
            app, [*path.split()[1:], "--help"], env=environment, prog_name="tokenloom"
        )
        assert done.exit_code == 0, done.output
        text += f"# {path}\n{done.output}"
    lines = (re.sub(r"[\u2500-\u257f]+| +", " ", line).strip() for line in text.splitlines())
    return {"help.txt": "".join(f"{line}\n" for line in lines if line)}


def ledgers(folder: Path) -> dict[str, str]:
    """All that SQLite and Redis hold after the same story."""
    ledger: Ledger = SqliteLedger(folder / "ledger.db", lambda: NOW)
    _story(ledger)
    ledger.close()
    server = RedisServer(folder).start()
    try:
        ledger = RedisLedger(server.url(), lambda: NOW)
        _story(ledger)
        ledger.close()
        with server.client() as client:
            keys = {str(key): _redis_value(client, key) for key in sorted(client.keys())}
    finally:
        server.kill()
    return {
        "ledger_sqlite.json": _json(_tables(folder / "ledger.db")),
        "ledger_redis.json": _json(keys),
    }


def _story(ledger: Ledger) -> None:
    """A run that is opened, committed, revised, pinned, opened anew and thinned; and one that took another uid."""
    run, other = ("uid-1", "train"), ("uid-2", "train")
    ledger.create_run("wiki-and-code", "train", "uid-1", '{"seed":7}')
    epoch = ledger.execute(commands.Acquire(*run, "one", 15.0))
    ledger.execute(commands.Open(*run, epoch, opening_of(1, commit_at(0)), commit_at(0)))
    for rank in range(2):
        ledger.execute(commands.ClaimSlot(*run, epoch, 1, rank, f"nonce-{rank}"))
    for index in (8, 16, 24, 32):
        ledger.execute(commands.Commit(*run, epoch, 1, commit_at(index), journal=index != 24))
    for number in (1, 2, 3):
        revision = revision_of(number, 16 * number)
        ledger.execute(commands.Revise(*run, epoch, revision, known_changes=number - 1))
    ledger.execute(commands.DropRevisions(*run, epoch, 3, known_changes=3))
    ledger.execute(
        commands.SaveSnapshot(
            *run, StoredSnapshot(id="saved", sample_index=16, saved_at=NOW, text='{"sealed":"€"}')
        )
    )
    ledger.execute(commands.Pin(*run, epoch, '{"sample_index":16}', 1))
    second = replace(
        opening_of(2, commit_at(16)),
        parent_run='{"run":"parent"}',
        batch_plans='{"sizes":[[0,4]],"accumulate":2}',
    )
    ledger.execute(commands.Open(*run, epoch, second, commit_at(16)))
    ledger.execute(commands.ClaimSlot(*run, epoch, 2, 0, "nonce"))
    for index in range(24, 64, 8):
        ledger.execute(commands.Commit(*run, epoch, 2, commit_at(index), journal=True))
    ledger.execute(commands.ThinJournal(*run, epoch))
    ledger.execute(commands.Pin(*run, epoch, '{"sample_index":24}', 2))
    ledger.execute(commands.Renew(*run, epoch, "one", 20.0, NOW - 1.5, 2, 56))
    ledger.create_run("another", "train", "uid-2", "{}")
    epoch = ledger.execute(commands.Acquire(*other, "two", 15.0))
    ledger.execute(commands.Adopt(*other, epoch, "uid-3"))
    ledger.execute(commands.Release("uid-3", "train", epoch))


def _tables(path: Path) -> dict[str, Any]:
    database = sqlite3.connect(path)
    try:
        names = [
            name
            for (name,) in database.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1"
            )
        ]
        found: dict[str, Any] = {
            "user_version": database.execute("PRAGMA user_version").fetchone()[0]
        }
        for name in names:
            cursor = database.execute(f"SELECT * FROM {name}")
            columns = [column[0] for column in cursor.description]
            found[name] = sorted(
                (dict(zip(columns, row, strict=True)) for row in cursor), key=json.dumps
            )
        return found
    finally:
        database.close()


def _redis_value(client: Any, key: str) -> Any:
    match client.type(key):
        case "hash":
            fields = dict(sorted(client.hgetall(key).items()))
            # A lease is by Redis's own clock.
            return {
                name: "(a time)" if name in _LEASE and value != "0" else value
                for name, value in fields.items()
            }
        case "zset":
            return client.zrange(key, 0, -1, withscores=True)
        case "set":
            return sorted(client.smembers(key))
        case "list":
            return client.lrange(key, 0, -1)
        case _:
            return client.get(key)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


#: Each gives the texts of some files of ``FOLDER``, by name; it may write below the folder that it is handed.
GOLDENS: dict[str, Callable[[Path], dict[str, str]]] = {
    "conversation": conversation,
    "openapi": openapi,
    "metrics": metrics,
    "help": help_texts,
    "ledgers": ledgers,
}

if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:] or GOLDENS:
        with tempfile.TemporaryDirectory() as made:
            for file, text in GOLDENS[name](Path(made)).items():
                (FOLDER / file).write_text(text, encoding="utf-8")

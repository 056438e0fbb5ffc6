"""The exchange that tests/conformance/worked-exchange.md shows, field by field in bytes, as a server answers it."""

from __future__ import annotations

import json
import queue
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.seal import seal

from tests.support.served import over_grpc, runs_of

#: In place of the id that each new run draws.
RUN_UID = "00112233445566778899aabbccddeeff"
_SHOWN_BYTES = 24
_MIXTURE = {
    "run": "worked",
    "tokenizer": "bytes",
    "sequence_length": 8,
    "mixture": {"policy": "least_consumed", "children": [{"source": "jsonl:data.jsonl:text"}]},
}


def exchange() -> dict[str, Message]:
    """By what they are: the messages of one rank that joins, gets a micro-step of two samples, and reports it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.jsonl").write_text(
            '{"text": "To be, or not to be"}\n' * 8, encoding="utf-8"
        )
        (folder / "worked.yaml").write_text(yaml.safe_dump(_MIXTURE), encoding="utf-8")
        with (
            runs_of(folder, folder / "worked.yaml") as runs,
            over_grpc(runs) as address,
            grpc.insecure_channel(address) as channel,
        ):
            return _exchange(DataLoaderStub(channel))


def _exchange(stub: DataLoaderStub) -> dict[str, Message]:
    join = wire.JoinRequest(
        run="worked",
        world_size=1,
        batch_size=2,
        attempt="first",
        nonce="rank-0",
        resume="fresh",
        accumulate=1,
    )
    joined: wire.JoinResponse = stub.Join(join)
    opening = wire.StreamOpen(
        run="worked",
        run_uid=joined.run_uid,
        generation=joined.generation,
        nonce="rank-0",
        received_digest=joined.start_digest,
        progress=wire.Progress(digest=joined.start_digest, credit_micro_steps=1),
        attempt="first",
        server_epoch=joined.server_epoch,
        number=1,
    )
    requests: queue.SimpleQueue[wire.StreamRequest | None] = queue.SimpleQueue()
    requests.put(wire.StreamRequest(open=opening))
    call = stub.Stream(iter(requests.get, None))
    response = next(answer for answer in call if answer.HasField("batches"))
    micro_step = response.batches.micro_steps[0]
    progress = wire.Progress(
        consumed_through=micro_step.end_index, digest=micro_step.digest, credit_micro_steps=1
    )
    requests.put(wire.StreamRequest(progress=progress))
    requests.put(None)
    for _ in call:
        pass
    snapshot = stub.Snapshot(wire.SnapshotRequest(run="worked", sample_index=micro_step.end_index))
    messages = {
        "1 → Join": join,
        "2 ← Join": joined,
        "3 → Stream": wire.StreamRequest(open=opening),
        "4 ← Stream": response,
        "5 → Stream": wire.StreamRequest(progress=progress),
        "the state": snapshot,
    }
    return {what: _with_uid(message, joined.run_uid) for what, message in messages.items()}


def _with_uid(message: Message, uid: str) -> Message:
    """With the page's id of the run, which is as long, and without the release; a state is sealed anew."""
    same = type(message).FromString(
        message.SerializeToString().replace(uid.encode(), RUN_UID.encode())
    )
    if isinstance(same, wire.SnapshotResponse):
        same.snapshot_json = seal(json.loads(same.snapshot_json))
    if isinstance(same, wire.JoinResponse):
        same.ClearField("release")
    return same


def rows(message: Message, path: str = "") -> Iterator[tuple[str, bytes, str]]:
    """Of each field, by number, its path, bytes and value; of a message in it first the bytes before its own."""
    for field, value in sorted(message.ListFields(), key=lambda pair: pair[0].number):
        packed = field.is_repeated and field.type != FieldDescriptor.TYPE_MESSAGE
        for element in [value] if packed or not field.is_repeated else value:
            alone = type(message)()
            if not field.is_repeated and field.type != FieldDescriptor.TYPE_MESSAGE:
                setattr(alone, field.name, element)
            elif field.is_repeated:
                getattr(alone, field.name).extend(element if packed else [element])
            else:
                getattr(alone, field.name).CopyFrom(element)
            data, name = alone.SerializeToString(), f"{path}{field.name}"
            if isinstance(element, Message):
                own = element.SerializeToString()
                yield name, data[: len(data) - len(own)], f"{len(own)} bytes follow"
                yield from rows(element, f"{name}.")
            else:
                yield name, data, _value(field, element)


def _value(field: FieldDescriptor, value: Any) -> str:
    """As people read it."""
    if field.name == "counts":
        return " ".join(
            f"{each.name} {list(entries)}"
            for each, entries in wire.SourceCounts.FromString(value).ListFields()
        )
    if field.name == "ids":
        return f"`{value.decode('utf-16-le')}`: of each id two bytes"
    if isinstance(value, bytes):
        return f"`{value.decode()}`"
    if field.enum_type is not None:
        return f"`{field.enum_type.values_by_number[value].name}`"
    return f"`{list(value)}`" if field.is_repeated else f"`{value}`"


def table() -> list[tuple[str, str, str, str]]:
    """The rows of the page's table: message, field, bytes in hexadecimal digits, value."""
    shown = []
    for what, message in exchange().items():
        for name, data, value in rows(message):
            rest = f" … {len(data)} bytes" if len(data) > _SHOWN_BYTES else ""
            shown.append((what, f"`{name}`", f"`{data[:_SHOWN_BYTES].hex(' ')}`{rest}", value))
    return shown

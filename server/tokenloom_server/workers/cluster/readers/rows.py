"""What is asked of a reader, what it answers, and how that comes to the server: JSON on a socket and Arrow's arrays in
shared memory, from which nothing can execute."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tokenloom_server import errors
from tokenloom_server.errors import TokenloomError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow, Rows

#: Bytes of ids after which an answer ends, so that its size has a bound; the rest of the rows is asked for again.
ANSWER_BYTES = 1 << 24
#: Bytes of a stream at most, beside its batches.
SCHEMA_BYTES = 1 << 16


class Part(NamedTuple):
    """Consecutive rows of one file. ``position``: a row at or before the first and where that begins, if the file does
    not say so itself."""

    shard: int
    first_row: int
    rows: int
    position: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Rows of one source. ``order``: the digest of the description (``cluster.description``) of the run's record."""

    order: str
    source: int
    parts: Sequence[Part]
    apart: bool = False
    """Whether each text is encoded in a process that may die of it."""

    def to_json(self) -> str:
        return json.dumps([self.order, self.source, self.parts, self.apart])

    @classmethod
    def from_json(cls, text: str) -> Request:
        order, source, parts, apart = json.loads(text)
        return cls(order, source, [Part(*part) for part in parts], apart)

    def after(self, rows: int) -> Request | None:
        """What is left of it once so many of its rows are there."""
        left = []
        for part in self.parts:
            skipped = min(rows, part.rows)
            if skipped < part.rows:
                left.append(
                    part._replace(first_row=part.first_row + skipped, rows=part.rows - skipped)
                )
            rows -= skipped
        return replace(self, parts=left) if left else None


class Work(NamedTuple):
    """What an answer took: the machine, seconds of its CPU, what was logged there: levels and lines, and Ray's name of
    the machine."""

    node: str = ""
    cpu_s: float = 0.0
    log: Sequence[tuple[int, str]] = ()
    node_id: str = ""


class Answer(NamedTuple):
    """The first rows that were asked for, with the numbers of their files; after them ``error``, where there is one.

    Columns are large lists of ids in the narrow dtype, or structs of ``ids`` and ``mask``. ``refused``: why the machine
    gives nothing, where its files or versions are not the server's.
    """

    pieces: Sequence[tuple[int, Rows]] = ()
    error: TokenloomError | None = None
    refused: str = ""
    work: Work = Work()

    @property
    def rows(self) -> int:
        return sum(len(rows.column) for _, rows in self.pieces)

    @property
    def tokens(self) -> int:
        columns = [rows.column for _, rows in self.pieces]
        return sum(
            len((each.field(0) if pa.types.is_struct(each.type) else each).values)
            for each in columns
        )

    def encoded(self) -> tuple[str, list[pa.RecordBatch]]:
        """A head as JSON, and the rows of each piece."""
        head = {
            "pieces": [[shard, rows.first_row, rows.bad] for shard, rows in self.pieces],
            "error": None if self.error is None else [self.error.name, str(self.error)],
            "refused": self.refused,
            "work": self.work,
        }
        return json.dumps(head), [_batch(rows) for _, rows in self.pieces]

    @classmethod
    def decoded(cls, head: str, batches: Iterable[pa.RecordBatch]) -> Answer:
        """Of what ``encoded`` gave; the rows are views of it."""
        fields = json.loads(head)
        pieces = [
            (shard, _rows(first_row, bad, batch))
            for (shard, first_row, bad), batch in zip(fields["pieces"], batches, strict=True)
        ]
        name, message = fields["error"] or ("", "")
        error = getattr(errors, name)(message) if name else None
        return cls(pieces, error, fields["refused"], Work(*fields["work"]))


def _batch(rows: Rows) -> pa.RecordBatch:
    assert rows.sizes is not None
    filtered = np.zeros(len(rows.column), np.bool_) if rows.filtered is None else rows.filtered
    columns = [
        rows.column,
        arrays.from_numbers(rows.sizes),
        arrays.from_numbers(filtered.view(np.uint8)),
    ]
    return pa.RecordBatch.from_arrays(columns, ["rows", "sizes", "filtered"])


def _rows(first_row: int, bad: Sequence[Any], batch: pa.RecordBatch) -> Rows:
    column, sizes, filtered = batch.columns
    is_filtered = arrays.numbers(filtered).view(np.bool_)
    return Rows(
        first_row,
        column,
        tuple(BadRow(*row) for row in bad),
        is_filtered if is_filtered.any() else None,
        arrays.numbers(sizes),
    )


def send(to: Connection, **message: Any) -> None:
    """For one thread at a time. Raises ``OSError`` where nobody is at the other end."""
    to.send_bytes(json.dumps(message).encode())


def receive(of: Connection) -> dict[str, Any] | None:
    """The next message; None where the other end is gone."""
    try:
        message: dict[str, Any] = json.loads(of.recv_bytes())
    except (EOFError, OSError):
        return None
    return message


def write(memory: Any, batches: Sequence[pa.RecordBatch]) -> int:
    """Puts them at the beginning of some memory, of ``size_of`` bytes at least; how many it took."""
    sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory))
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return int(sink.tell())


def size_of(batches: Sequence[pa.RecordBatch]) -> int:
    """Bytes that ``write`` takes at most."""
    return SCHEMA_BYTES + sum(int(pa.ipc.get_record_batch_size(batch)) for batch in batches)

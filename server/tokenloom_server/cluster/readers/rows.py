"""What is asked of a reader, and what it answers: JSON and plain arrays, from which nothing can execute."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server import errors
from tokenloom_server.errors import TokenloomError
from tokenloom_server.packing.reading import RowRange
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow, Rows

#: Bytes of ids after which an answer ends, so that its size has a bound; the rest of the rows is asked for again.
ANSWER_BYTES = 1 << 24
#: Where arrays begin in an answer.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Request:
    """Rows of one source. ``order``: the digest of the description (``cluster.description``) of the run's record."""

    order: str
    source: int
    ranges: Sequence[RowRange]
    positions: Sequence[tuple[int, int]] = ()
    """For each range, a row at or before its first and where that begins, if its files do not say so themselves."""
    apart: bool = False
    """Whether each text is encoded in a process that may die of it."""

    def to_json(self) -> str:
        return json.dumps([self.order, self.source, self.ranges, self.positions, self.apart])

    @classmethod
    def from_json(cls, text: str | bytes) -> Request:
        order, source, ranges, positions, apart = json.loads(text)
        return cls(
            order, source, [RowRange(*each) for each in ranges], [(row, begin) for row, begin in positions], apart
        )

    def after(self, rows: Sequence[int]) -> Request | None:
        """What is left of it once so many rows of its first ranges are there."""
        ranges = list(self.ranges[len(rows) :])
        if rows and rows[-1] < self.ranges[len(rows) - 1].rows:
            shard, first, count = self.ranges[len(rows) - 1]
            ranges.insert(0, RowRange(shard, first + rows[-1], count - rows[-1]))
        return replace(self, ranges=ranges, positions=self.positions[-len(ranges) :]) if ranges else None


class Work(NamedTuple):
    """What an answer took: the machine, seconds of its CPU, what was logged there: levels and lines, and Ray's name of
    the machine."""

    node: str = ""
    cpu_s: float = 0.0
    log: Sequence[tuple[int, str]] = ()
    node_id: str = ""


class Answer(NamedTuple):
    """Rows as ids, of each range as many as ``rows`` says; after them ``error``, where there is one.

    ``ids`` [tokens]: the narrow dtype; ``ends`` [rows] int64: where each row's end; ``sizes`` [rows] int64: the bytes
    of its text; ``mask`` [tokens] uint8 or None; ``filtered`` [rows] bool or None; ``bad``: positions among the rows,
    and the reasons. ``refused``: why the machine gives nothing, where its files or versions are not the server's.
    """

    rows: Sequence[int]
    ids: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None = None
    filtered: npt.NDArray[np.bool_] | None = None
    bad: Sequence[tuple[int, str]] = ()
    error: TokenloomError | None = None
    refused: str = ""
    work: Work = Work()

    def to_bytes(self) -> npt.NDArray[np.uint8]:
        """Its bytes: the length of a head, the head as JSON, and the arrays."""
        columns = (self.ids, self.ends, self.sizes, self.mask, self.filtered)
        head = json.dumps(
            {
                "rows": self.rows,
                "columns": [None if column is None else [column.dtype.str, len(column)] for column in columns],
                "bad": self.bad,
                "error": None if self.error is None else [self.error.name, str(self.error)],
                "refused": self.refused,
                "work": self.work,
            }
        ).encode()
        parts = [np.array([len(head)], np.int64).view(np.uint8), np.frombuffer(head, np.uint8)]
        for column in columns:
            if column is not None:
                padding = np.zeros(-sum(map(len, parts)) % _ALIGNMENT, np.uint8)
                parts += [padding, np.ascontiguousarray(column).view(np.uint8)]
        return np.concatenate(parts)

    @classmethod
    def from_bytes(cls, data: Any) -> Answer:
        """Of any buffer; the arrays are views of it."""
        position = 8 + int(np.frombuffer(data, np.int64, 1)[0])
        head = json.loads(bytes(memoryview(data)[8:position]))
        columns: list[npt.NDArray[Any] | None] = []
        for described in head["columns"]:
            if described is None:
                columns.append(None)
                continue
            dtype, count = np.dtype(described[0]), described[1]
            position += -position % _ALIGNMENT
            columns.append(np.frombuffer(data, dtype, count, position))
            position += count * dtype.itemsize
        ids, ends, sizes, mask, filtered = columns
        assert ids is not None and ends is not None and sizes is not None
        name, message = head["error"] or ("", "")
        return cls(
            head["rows"],
            ids,
            ends,
            sizes,
            mask,
            filtered,
            [(position, reason) for position, reason in head["bad"]],
            getattr(errors, name)(message) if name else None,
            head["refused"],
            Work(*head["work"]),
        )

    def pieces(self, ranges: Sequence[RowRange]) -> Iterator[tuple[int, Rows]]:
        """The rows of each range, with the number of their file. ``ranges``: those that were asked for."""
        lists = arrays.lists(np.concatenate((np.zeros(1, np.int64), self.ends)), arrays.from_numbers(self.ids))
        column = lists
        if self.mask is not None:
            masks = arrays.lists(np.concatenate((np.zeros(1, np.int64), self.ends)), arrays.from_numbers(self.mask))
            column = pa.StructArray.from_arrays([lists, masks], ["ids", "mask"])
        whole = Rows(0, column, tuple(BadRow(*each) for each in self.bad), self.filtered, self.sizes)
        begin = 0
        for (shard, first_row, _), count in zip(ranges, self.rows, strict=False):
            if count:
                yield shard, whole.cut(begin, begin + count)._replace(first_row=first_row)
            begin += count

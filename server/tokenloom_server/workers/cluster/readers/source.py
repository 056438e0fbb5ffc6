"""A source whose rows come as ids from readers, asked for ahead of whoever packs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import numpy as np

from tokenloom_server.errors import TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.reading import RowRange
from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.sources.row_index import IndexedSource
from tokenloom_server.sources.wrapped import WrappedSource
from tokenloom_server.workers.cluster.readers.rows import Answer, Part, Request

#: Bytes of text of a request, about: a task costs half a millisecond whatever it has to do.
REQUEST_BYTES = 1 << 23
#: Rows of a source's first request, before it is known how long its rows are; and of any.
FIRST_ROWS, MOST_ROWS = 256, 1 << 16
#: Requests that a source has before it: so many to begin with, and twice as many each time it had to wait.
FEWEST_AHEAD, MOST_AHEAD = 2, 256


class Ticket(Protocol):
    """A request that somebody works on."""

    @property
    def request(self) -> Request: ...

    def take(self) -> Answer:
        """Waits for the answer; asked for once. Raises ``SourceError`` where nobody gives one."""

    def is_answered(self) -> bool:
        """Whether ``take`` would not wait."""


class Asked(Protocol):
    """Who answers requests?"""

    def ask(self, order: PipelineFactory, request: Request) -> Ticket:
        """Begins to work on a request."""

    def has_room(self) -> bool:
        """Whether more requests make an answer come sooner."""


class RowsOfReaders(WrappedSource):
    """Implements ``ReadySource``. The inner source knows rows and blocks; its own rows are not read."""

    def __init__(
        self, order: PipelineFactory, digest: str, source_id: int, reader: Source, asked: Asked
    ) -> None:
        super().__init__(reader)
        self._order = order
        self.digest = digest
        self._source_id = source_id
        self._asked = asked
        self._plan: Iterator[RowRange] = iter(())
        self._rest: RowRange | None = None
        self._tickets: deque[Ticket] = deque()
        self._ahead = FEWEST_AHEAD
        # Of the answer at work: rows that were not given, and the error after them.
        self._pieces: deque[tuple[int, Rows]] = deque()
        self._error: TokenloomError | None = None
        self._rows_seen = self._bytes_seen = 0

    def announce(self, ranges: Iterator[RowRange]) -> None:
        """See ``ReadySource``."""
        # Requests that nobody holds any more are forgotten.
        self._tickets.clear()
        self._pieces.clear()
        self._plan, self._rest, self._error = ranges, None, None

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        """Rows up to the end of what was announced together; of what was not announced, up to the file's end."""
        has_given = False
        while row < self.row_count(shard):
            rows = self._next(shard, row)
            if rows is None:
                if has_given:
                    return
                self.announce(iter([RowRange(shard, row, self.row_count(shard) - row)]))
                continue
            has_given = True
            yield rows
            row += len(rows.column)

    def _next(self, shard: int, row: int) -> Rows | None:
        """The rows of a file from one on; None where others come next."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._fill()
            if not self._tickets:
                return None
            self._take(self._tickets.popleft())
            self._fill()
        if self._pieces[0][0] != shard or self._pieces[0][1].first_row != row:
            return None
        return self._pieces.popleft()[1]

    def _take(self, ticket: Ticket) -> None:
        if not ticket.is_answered():
            self._ahead = min(2 * self._ahead, MOST_AHEAD)
            self._fill()
        answer = ticket.take()
        self._pieces.extend(answer.pieces)
        self._error = answer.error
        self._rows_seen += answer.rows
        self._bytes_seen += sum(
            int(rows.sizes.sum()) for _, rows in answer.pieces if rows.sizes is not None
        )
        rest = ticket.request.after(answer.rows)
        if rest is not None and answer.error is None:
            self._tickets.appendleft(self._asked.ask(self._order, rest))

    def _fill(self) -> None:
        while len(self._tickets) < self._ahead and (not self._tickets or self._asked.has_room()):
            parts = self._cut()
            if not parts:
                return
            self._tickets.append(
                self._asked.ask(self._order, Request(self.digest, self._source_id, parts))
            )

    def _planned(self) -> RowRange | None:
        # Of a file that cannot be opened, nothing more is planned: it is an error once its turn comes.
        with suppress(TokenloomError):
            return next(self._plan, None)
        return None

    def _cut(self) -> list[Part]:
        """The rows of the next request."""
        wanted = min(max(1, REQUEST_BYTES * self._rows_seen // max(self._bytes_seen, 1)), MOST_ROWS)
        wanted = wanted if self._rows_seen else FIRST_ROWS
        parts: list[Part] = []
        while wanted > 0 and (each := self._rest or self._planned()):
            shard, first, rows = each
            # What begins within a block is found past all before it there.
            edges = self._source.blocks(shard)
            end = first + wanted
            block_end = int(edges[min(int(np.searchsorted(edges, end)), len(edges) - 1)])
            end = min(first + rows, block_end if block_end <= end + wanted else end)
            self._rest = RowRange(shard, end, first + rows - end) if end < first + rows else None
            if rows > 0:
                position = (
                    self._source.position(shard, first)
                    if isinstance(self._source, IndexedSource)
                    else None
                )
                parts.append(Part(shard, first, end - first, position))
                wanted -= end - first
        return parts

"""Rows of a source as ids: a pure function of a run's record and a request, wherever it is called."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenloom_server.cluster.readers.rows import ANSWER_BYTES, Answer, Request, Work
from tokenloom_server.errors import SourceError, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, TokenizedRows
from tokenloom_server.sources import columns
from tokenloom_server.sources.base import Rows
from tokenloom_server.sources.row_index import IndexedSource
from tokenloom_server.sources.wrapped import WrappedSource


class _SizedSource(WrappedSource):
    """Another source, of which the bytes of each row that was read are kept, for each time apart."""

    sizes: list[list[Any]]

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        self.sizes.append([np.empty(0, np.int64)])
        for rows in super().read(shard, row):
            self.sizes[-1].append(columns.byte_sizes(rows.column))
            yield rows


def read(order: PipelineFactory, request: Request, node: str = "") -> Answer:
    """The rows that are asked for, up to an error, or up to the one with which the answer is full."""
    began = time.process_time()
    reader = order.readers.open(request.source)
    sized: list[_SizedSource] = []

    def wrap(source: Any) -> _SizedSource:
        sized.append(_SizedSource(source))
        sized[0].sizes = []
        return sized[0]

    documents = order.all_rows(request.source, reader, wrap, apart=request.apart)
    counts: list[int] = []
    parts: list[TokenizedRows] = []
    error: TokenloomError | None = None
    size = 0
    try:
        for i, (shard, first_row, rows) in enumerate(request.ranges):
            if isinstance(reader, IndexedSource):
                reader.know(shard, request.positions[i])
            counts.append(0)
            for part in documents.read_part(shard, first_row, rows):
                parts.append(part)
                counts[-1] += len(part.ends)
                size += part.ids.nbytes
                if size >= ANSWER_BYTES:
                    break
            if size >= ANSWER_BYTES:
                break
            if counts[-1] < rows:
                path = reader.shards[shard].path
                raise SourceError(f"{path} ends at row {first_row + counts[-1]}; it was changed: put it back as it was")
    except TokenloomError as raised:
        error = raised
    sizes = [np.concatenate(each)[:count] for each, count in zip(sized[0].sizes, counts, strict=True)]
    answer = _answer(counts, parts, sizes, order.record.dtype)
    return answer._replace(error=error, work=Work(node, time.process_time() - began))


def _answer(counts: list[int], parts: list[TokenizedRows], sizes: list[Any], dtype: np.dtype[Any]) -> Answer:
    if not parts:
        none = np.empty(0, np.int64)
        return Answer([], np.empty(0, dtype), none, none)
    whole = TokenizedRows.joined(parts)
    bad, filtered = [], None
    if whole.row_status is not None:
        # A row may be there twice, in two ranges; its reason is the same.
        bad = [(row, whole.reasons[whole.origin(row)]) for row in np.flatnonzero(whole.row_status == BAD).tolist()]
        filtered = whole.row_status == FILTERED
    return Answer(counts, whole.ids, whole.ends, np.concatenate(sizes), whole.mask, filtered, bad)

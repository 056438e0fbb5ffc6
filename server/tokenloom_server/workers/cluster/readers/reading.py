"""Rows of a source as ids: a pure function of a run's record and a request, wherever it is called."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import SourceError, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import Int64s
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, TokenizedRows
from tokenloom_server.sources import arrays, columns
from tokenloom_server.sources.base import BadRow, Rows
from tokenloom_server.sources.row_index import IndexedSource
from tokenloom_server.workers.cluster.readers.rows import ANSWER_BYTES, Answer, Request, Work


class _SizedDocuments(Documents):
    """``sizes`` [rows]: the bytes of the rows that were made into tokens last."""

    sizes: Int64s

    def tokenized(self, epoch: int, shard: int, rows: Rows) -> TokenizedRows:
        self.sizes = columns.byte_sizes(rows.column)
        return super().tokenized(epoch, shard, rows)


def read(order: PipelineFactory, request: Request, node: str = "") -> Answer:
    """The rows that are asked for, up to an error, or up to those with which the answer is full."""
    began = time.process_time()
    pieces: list[tuple[int, Rows]] = []
    error: TokenloomError | None = None
    size = 0
    try:
        for piece in _pieces(order, request):
            pieces.append(piece)
            size += piece[1].column.nbytes
            if size >= ANSWER_BYTES:
                break
    except TokenloomError as raised:
        error = raised
    return Answer(pieces, error, work=Work(node, time.process_time() - began))


def _pieces(order: PipelineFactory, request: Request) -> Iterator[tuple[int, Rows]]:
    order = order.apart() if request.apart else order
    reader = order.readers.open(request.source)
    documents = order.all_rows(_SizedDocuments, request.source, reader, joined=not request.apart)
    for shard, first_row, rows, position in request.parts:
        if isinstance(reader, IndexedSource) and position is not None:
            reader.know(shard, position)
        row = first_row
        for tokenized in documents.read_part(shard, first_row, rows):
            yield shard, _rows(tokenized, documents.sizes)
            row += len(tokenized.ends)
        if row < first_row + rows:
            raise SourceError(
                f"{documents.path(shard)} ends at row {row}; it was changed: put it back as it was"
            )


def _rows(tokenized: TokenizedRows, sizes: Int64s) -> Rows:
    begins = np.concatenate((np.zeros(1, np.int64), tokenized.ends))
    column = arrays.lists(begins, arrays.from_numbers(tokenized.ids))
    if tokenized.mask is not None:
        masks = arrays.lists(begins, arrays.from_numbers(tokenized.mask))
        column = pa.StructArray.from_arrays([column, masks], ["ids", "mask"])
    rows = Rows(tokenized.first_row, column, sizes=sizes)
    if (status := tokenized.row_status) is None:
        return rows
    reasons = tokenized.reasons
    bad = tuple(
        BadRow(row, reasons[tokenized.origin(row)])
        for row in np.flatnonzero(status == BAD).tolist()
    )
    return rows._replace(bad=bad, filtered=status == FILTERED)

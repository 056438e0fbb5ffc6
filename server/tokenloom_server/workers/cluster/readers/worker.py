"""The task of a reader: rows of a source as ids, a pure function of a run's record and a request wherever it is called;
and as it runs in a process of Ray's."""

from __future__ import annotations

import platform
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import SourceChanged, SourceError, StorageError, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import Int64s
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, TokenizedRows
from tokenloom_server.sources import arrays, columns
from tokenloom_server.sources.base import BadRow, Rows
from tokenloom_server.sources.row_index import IndexedSource
from tokenloom_server.workers.cluster.description import (
    LoggedLines,
    named_by_node,
    rebuild,
    verify_file,
)
from tokenloom_server.workers.cluster.readers.rows import ANSWER_BYTES, Answer, Request, Work


@dataclass(frozen=True, slots=True)
class Described:
    """A run's record as it lies in Ray's store, known by its digest."""

    digest: str
    text: Any = field(compare=False)
    """A reference to the description."""


def answer(described: Described, request_json: str) -> tuple[str, list[pa.RecordBatch]]:
    """``Answer.encoded``. Never raises for what the run's files or this machine hold."""
    import ray

    request, node = Request.from_json(request_json), platform.node()
    with LoggedLines() as lines:
        try:
            order = _order(described)
            for shard in {part.shard for part in request.parts}:
                _check(described, request.source, shard)
            made = read(order, request, node)
            if isinstance(made.error, (SourceChanged, StorageError)):
                raise made.error  # of this machine, perhaps, alone
        except TokenloomError as error:
            made = Answer(refused=named_by_node(error))
    work = made.work._replace(
        node=node, log=lines.lines(), node_id=ray.get_runtime_context().get_node_id()
    )
    return made._replace(work=work).encoded()


def check(described: Described, sources: Sequence[int]) -> str:
    """Why this machine cannot read these sources of a run; or nothing. Looks at the first file of each."""
    try:
        for source in sources:
            _check(described, source, 0)
    except TokenloomError as error:
        return named_by_node(error)
    return ""


@lru_cache(maxsize=4)
def _order(described: Described) -> PipelineFactory:
    import ray

    order = rebuild(ray.get(described.text))
    weakref.finalize(order, order.resources.close)
    return order


@lru_cache(maxsize=1 << 16)
def _check(described: Described, source: int, shard: int) -> None:
    verify_file(_order(described), source, shard)


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

"""Rows of a file as a user's function makes texts of them, tokenised."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, TokenizedRows
from tokenloom_server.packing.window import RangeReader
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import Rows
from tokenloom_server.sources.transform import Transform, TransformFailed
from tokenloom_server.tokenizer.documents import Encoder


def read_transformed(
    order: PipelineFactory, transform: Transform, source: int, file: int, row: int, count: int
) -> Iterator[tuple[int, TokenizedRows]]:
    """So many rows of a file from one of them on, some at a time: how many these are, and the texts made of them.

    Rows that are bad or filtered out do not reach the function; they stand as empty ones after the texts of the others.
    Raises ``SourceError`` with file and rows where the function fails, and ``TokenizerError``.
    """
    reader = order.readers.open(source)
    encoder = order.encoder(source, reader)
    where = f"{order.config.sources[source].source}: {reader.shards[file].path}"
    for rows in RangeReader(reader).read(file, row, row + count):
        yield len(rows.column), _tokenized(transform, encoder, rows, file, where)


def _tokenized(transform: Transform, encoder: Encoder, rows: Rows, file: int, where: str) -> TokenizedRows:
    passing = np.ones(len(rows.column), np.bool_) if rows.filtered is None else ~rows.filtered
    filtered = len(passing) - int(passing.sum())
    passing[[row.position for row in rows.bad]] = False
    numbers = rows.first_row + np.flatnonzero(passing)
    column = arrays.plain(rows.column).cast(pa.large_string())
    if column.null_count:
        column = arrays.filled(column)
    if len(numbers) < len(column):
        column = column.take(arrays.from_numbers(np.flatnonzero(passing)))
    try:
        texts = transform.texts(column) if len(column) else column
        documents = encoder.encode(texts, rows.first_row, file)
    except TransformFailed as error:
        first, last = numbers[error.begin], numbers[error.end - 1]
        failed = f"row {first}" if first == last else f"rows {first} to {last}"
        raise SourceError(f"{where}: {failed}: {error}; mend it, and prepare into another folder") from None
    except TokenizerError as error:
        made = f"what {transform.name} made of row {numbers[0]} and those after it, counted from there"
        raise TokenizerError(f"{where}: {made}: {error}") from None
    empty = len(rows.bad) + filtered
    end = documents.ends[-1] if len(texts) else np.int64(0)
    row_status = np.zeros(len(texts) + empty, np.uint8)
    row_status[len(texts) :] = [BAD] * len(rows.bad) + [FILTERED] * filtered
    reasons = {len(texts) + number: row.reason for number, row in enumerate(rows.bad)}
    reasons |= {row.position: f"{where}: {row.reason}" for row in documents.bad}
    row_status[list(reasons)] = BAD
    ends = np.concatenate([documents.ends, np.full(empty, end)])
    tokenized = TokenizedRows(0, file, rows.first_row, documents.values, ends, row_status=row_status)
    return tokenized._replace(reasons={tokenized.origin(row): reason for row, reason in reasons.items()})

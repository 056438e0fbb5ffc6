"""Rows of a file as a user's function makes texts of them, tokenised."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, TokenizedRows
from tokenloom_server.packing.window import RangeReader
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import Source
from tokenloom_server.tokenizer.documents import Encoder
from tokenloom_server.workers.processes import Transform, TransformFailed, rows_named


def read_transformed(
    reader: Source, encoder: Encoder, transform: Transform, spec: str, file: int, row: int, count: int
) -> Iterator[tuple[int, TokenizedRows]]:
    """So many rows of a file from one of them on, some at a time: how many these are, and the texts made of them.

    Rows that are bad or filtered out do not reach the function; they stand as empty ones after the texts of the others.
    Raises ``SourceError`` with file and rows where the function fails, and ``TokenizerError``.
    """
    where = f"{spec}: {reader.shards[file].path}"
    for rows in RangeReader(reader).read(file, row, row + count):
        passing = np.ones(len(rows.column), np.bool_) if rows.filtered is None else ~rows.filtered
        passing[[bad.position for bad in rows.bad]] = False
        positions = np.flatnonzero(passing)
        texts = arrays.filled(arrays.plain(rows.column).take(arrays.from_numbers(positions)).cast(pa.large_string()))
        if len(texts):
            try:
                texts = transform.made_of(texts)
            except TransformFailed as error:
                failed = rows_named(*(rows.first_row + positions[[error.begin, error.end - 1]]).tolist())
                raise SourceError(
                    f"{where}: {failed}: transform {transform.name} failed: {error}; mend it, and prepare into another "
                    "folder"
                ) from None
        try:
            documents = encoder.encode(texts, rows.first_row, file)
        except TokenizerError as error:
            made = f"what {transform.name} made of row {rows.first_row} and those after it, counted from there"
            raise TokenizerError(f"{where}: {made}: {error}") from None
        left_out = len(passing) - len(positions)
        row_status = np.repeat(np.array([0, FILTERED], np.uint8), [len(texts), left_out])
        reasons = {bad.position: f"{where}: {bad.reason}" for bad in documents.bad}
        reasons |= {len(texts) + number: bad.reason for number, bad in enumerate(rows.bad)}
        row_status[list(reasons)] = BAD
        ends = np.concatenate([documents.ends, np.full(left_out, len(documents.values))])
        made_of = TokenizedRows(0, file, rows.first_row, documents.values, ends, row_status=row_status)
        by_origin = {made_of.origin(position): reason for position, reason in reasons.items()}
        yield len(rows.column), made_of._replace(reasons=by_origin)

"""Rows of a file as a user's function makes texts of them, tokenised."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.tokenized_rows import TokenizedRows
from tokenloom_server.packing.window import RangeReader
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.workers.processes import Transform, TransformFailed, rows_named


def read_transformed(
    reader: Source, documents: Documents, transform: Transform, file: int, row: int, count: int
) -> Iterator[tuple[int, TokenizedRows]]:
    """So many rows of a file from one of them on, some at a time: how many these are, and the texts made of them.

    Rows that are bad or filtered out do not reach the function; they stand as empty ones after the texts of the others.
    Raises ``SourceError`` with file and rows where the function fails, and ``TokenizerError``.
    """
    for rows in RangeReader(reader).read(file, row, row + count):
        passing = np.ones(len(rows.column), np.bool_) if rows.filtered is None else ~rows.filtered
        passing[[bad.position for bad in rows.bad]] = False
        positions = np.flatnonzero(passing)
        texts = arrays.filled(
            arrays.plain(rows.column).take(arrays.from_numbers(positions)).cast(pa.large_string())
        )
        if len(texts):
            try:
                texts = transform.made_of(texts)
            except TransformFailed as error:
                failed = rows_named(
                    *(rows.first_row + positions[[error.begin, error.end - 1]]).tolist()
                )
                raise SourceError(
                    f"{documents.name}: {documents.path(file)}: {failed}: transform {transform.name} failed: {error}; "
                    "mend it, and prepare into another folder"
                ) from None
        made = pa.concat_arrays([texts, pa.nulls(len(passing) - len(positions), texts.type)])
        bad = tuple(
            each._replace(position=len(texts) + number) for number, each in enumerate(rows.bad)
        )
        try:
            yield (
                len(rows.column),
                documents.tokenized(
                    0, file, Rows(rows.first_row, made, bad, np.arange(len(made)) >= len(texts))
                ),
            )
        except TokenizerError as error:
            made_of = f"what {transform.name} made of row {rows.first_row} and those after it, counted from there"
            raise TokenizerError(f"{made_of}: {error}") from None

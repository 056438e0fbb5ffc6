"""How much a source has: the rows of one epoch, and the tokens of a row, without reading it.

Rows are counted by what files say of themselves: footers, headers, and the lines of text where that is little. Of
larger text, and for the tokens, a few places are read and stand for the rest. The same files and tokeniser give the
same numbers on any machine, whatever is cached: policies decide by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, Protocol

from tokenloom_server.packing.documents import Encoder
from tokenloom_server.sources import columns
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.lines import LinesSource

#: Places that are read of a source: spread over its shards, or within them where there are fewer.
PLACES = 8
#: Bytes of text or ids that are read at a place, and the row that reaches beyond them.
PLACE_BYTES = 1 << 19
#: A source of lines with at most so many bytes in its files is counted; beyond that, rows follow from the sample.
COUNTED_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Extent:
    """One epoch of a source: its ``rows``, and the tokens of 1,000 of them (with begin- and end-of-text ids).

    ``tokens_per_1000_rows`` is an estimate, unless the source is so small that all of it was read.
    """

    rows: int
    tokens_per_1000_rows: int

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return self.rows * self.tokens_per_1000_rows // 1000


class Readable(Protocol):
    """What has sources, and makes tokens of their rows: an order."""

    def open(self, source_id: int) -> Source: ...

    def encoder(self, source_id: int, reader: Source) -> Encoder: ...


class _Stratum(NamedTuple):
    """Consecutive rows of a shard, of which the first are read and stand for the others."""

    shard: int
    row: int
    rows: int


class _Sample(NamedTuple):
    rows: int
    tokens: int


def measure(order: Readable, source_id: int) -> Extent:
    """The extent of a source: rows of one epoch exactly for Parquet and Arrow files and little text.

    Reads ``PLACES`` × ``PLACE_BYTES`` and as many row groups at most, beside footers, headers and ``COUNTED_BYTES`` of
    lines. Raises ``SourceError`` and ``TokenizerError`` for a file, or a row of the sample, that is not readable.
    """
    reader = order.open(source_id)
    encoder = order.encoder(source_id, reader)
    if isinstance(reader, LinesSource) and sum(shard.size for shard in reader.shards) > COUNTED_BYTES:
        return _of_many_lines(reader, encoder)
    counts = [reader.row_count(shard) for shard in range(len(reader.shards))]
    strata = list(_strata(counts))
    tokens = Fraction(0)
    for stratum in strata:
        found = _sample(reader, encoder, stratum)
        tokens += Fraction(found.tokens * stratum.rows, found.rows)
    stood_for = sum(stratum.rows for stratum in strata)
    return Extent(sum(counts), round(1000 * tokens / stood_for))


def _of_many_lines(reader: LinesSource, encoder: Encoder) -> Extent:
    """From the heads of some shards, since to know where the lines of others lie they would have to be scanned."""
    rows = tokens = size = 0
    filled = [shard for shard, file in enumerate(reader.shards) if file.size]
    for shard in _spread(filled):
        # No file has more lines than bytes.
        found = _sample(reader, encoder, _Stratum(shard, 0, reader.shards[shard].size))
        rows += found.rows
        tokens += found.tokens
        size += reader.head_bytes(shard, found.rows)
    total = sum(shard.size for shard in reader.shards)
    # Rows and tokens by the bytes they take: how long lines are is what differs most from place to place.
    return Extent(max(1, round(Fraction(total * rows, size))), round(Fraction(1000 * tokens, rows)))


def _strata(counts: list[int]) -> Iterator[_Stratum]:
    filled = [shard for shard, rows in enumerate(counts) if rows]
    chosen = _spread(filled)
    parts = PLACES // len(chosen)
    for shard in chosen:
        edges = [counts[shard] * part // parts for part in range(parts + 1)]
        for begin, end in pairwise(edges):
            if begin < end:
                yield _Stratum(shard, begin, end - begin)


def _spread(shards: list[int]) -> list[int]:
    """At most ``PLACES`` of them, from the middle of as many equal parts."""
    places = min(len(shards), PLACES)
    return [shards[(2 * place + 1) * len(shards) // (2 * places)] for place in range(places)]


def _sample(reader: Source, encoder: Encoder, stratum: _Stratum) -> _Sample:
    """The first rows of a stratum, up to the one with which they reach ``PLACE_BYTES``: leaving that one out would
    leave out long rows more often than short ones."""
    rows = tokens = size = 0
    for piece in reader.read(stratum.shard, stratum.row):
        fits = columns.reach(piece.column, PLACE_BYTES - size)
        column = piece.column[: min(fits.rows, stratum.rows - rows)]
        tokens += len(encoder.encode(column, piece.first_row, stratum.shard).values)
        rows += len(column)
        size += fits.bytes
        if rows == stratum.rows or size >= PLACE_BYTES:
            break
    return _Sample(rows, tokens)

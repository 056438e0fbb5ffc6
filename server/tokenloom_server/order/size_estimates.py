"""How much a source has: the rows of one epoch, and the tokens of a row, without reading it.

Rows are counted by what files say of themselves: footers, headers, and the lines of text where that is little. Of
larger text, and for the tokens, a few places are read and stand for the rest. The same files and tokeniser give the
same numbers on any machine, whatever is cached: policies decide by them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.size_estimate import SizeEstimate
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.token_curve import TokenCurve
from tokenloom_server.packing.best_fit import Window, windowed_samples
from tokenloom_server.packing.unpacked import unpacked_samples
from tokenloom_server.sources import columns
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.lines import BOM, LinesSource
from tokenloom_server.tokenizer.documents import Encoder

#: Places that are read of a source: spread over its shards, or within them where there are few.
LEAST_PLACES, MOST_PLACES = 16, 64
#: Bytes of text or ids that are read of a source for how long rows are, which differs much more than the tokens that a
#: byte makes. A source whose files have no more is read whole.
READ_BYTES = 1 << 25
#: Bytes of these that are encoded.
ENCODED_BYTES = 1 << 22
#: A source of lines with at most so many bytes in its files is counted; beyond that, rows follow from the sample.
COUNTED_BYTES = 1 << 26


class _Stratum(NamedTuple):
    """Consecutive rows of a shard, of which the first are read and stand for the others."""

    shard: int
    row: int
    rows: int


class _Budget(NamedTuple):
    """Bytes that may be read, and encoded, at a place."""

    read: int
    encoded: int

    @classmethod
    def of(cls, total: int, places: int) -> _Budget:
        """The budget of a source whose files have ``total`` bytes. Compressed files may hold some times as much."""
        return cls(
            READ_BYTES if total <= READ_BYTES else max(1, READ_BYTES // places),
            ENCODED_BYTES if total <= ENCODED_BYTES else max(1, ENCODED_BYTES // places),
        )


def _sample_tokens(factory: PipelineFactory, lengths: npt.NDArray[np.int64]) -> int:
    """Tokens that the samples of consecutive rows count; ``lengths``: the tokens of each row."""
    config = factory.config
    if config.packing == "concat":
        return int(lengths.sum())
    if config.packing == "best_fit":
        window = Window(config.pack_window_rows, config.pack_window_tokens)
        return config.sequence_length * windowed_samples(lengths, factory.form, window)
    return config.sequence_length * unpacked_samples(lengths, factory.form, splits=config.long_rows == "split")


def _scaled(factory: PipelineFactory, tokens: Fraction, lengths: list[npt.NDArray[np.int64]]) -> Fraction:
    """What the samples of rows with so many tokens count, by those rows whose lengths are known."""
    every = np.concatenate(lengths)
    total = int(every.sum())
    if factory.config.packing == "none" or not total:
        return tokens
    return tokens * Fraction(_sample_tokens(factory, every), total)


class _Sample(NamedTuple):
    """Rows with their bytes of text or ids; of the first ``encoded_bytes`` of these, the tokens, and the rows."""

    rows: int
    bytes: int
    encoded_rows: int
    encoded_bytes: int
    #: Tokens of each row that was encoded.
    lengths: npt.NDArray[np.int64]

    def all_tokens(self, factory: PipelineFactory) -> Fraction:
        """Tokens of all the rows, by their bytes; where each row makes samples of its own, those of the samples."""
        if factory.config.packing == "none":
            return Fraction(_sample_tokens(factory, self.lengths) * self.rows, self.encoded_rows)
        tokens = int(self.lengths.sum())
        if not self.encoded_bytes:
            return Fraction(tokens * self.rows, self.encoded_rows)
        return Fraction(tokens * self.bytes, self.encoded_bytes)


def measure(factory: PipelineFactory, source_id: int) -> SizeEstimate:
    """Measures one epoch of a source: its rows exactly with ``batching``, for Parquet and Arrow files and little text.

    Reads ``READ_BYTES`` from ``MOST_PLACES`` row groups at most, or a source that has no more, beside footers, headers
    and ``COUNTED_BYTES`` of lines; encodes ``ENCODED_BYTES``. Raises ``SourceError`` and ``TokenizerError`` for a file,
    or a row of the sample, that is not readable.
    """
    readers = factory.readers
    if factory.config.batching is not None:
        epochs = readers.bucket_epochs(source_id)
        return SizeEstimate(epochs.batches * epochs.size, 1000)
    return _measure(factory, source_id, LEAST_PLACES)[0]


def measure_curve(factory: PipelineFactory, source_id: int) -> TokenCurve:
    """The tokens of a source over its rows, for plans: of ``MOST_PLACES`` strata where the places of its rows are
    known. Reads and raises what ``measure`` does."""
    return _measure(factory, source_id, MOST_PLACES)[1]


def _measure(factory: PipelineFactory, source_id: int, places: int) -> tuple[SizeEstimate, TokenCurve]:
    readers = factory.readers
    reader = readers.open(source_id)
    encoder = factory.encoder(source_id, reader)
    if isinstance(reader, LinesSource) and sum(shard.size for shard in reader.shards) > COUNTED_BYTES:
        estimate = _of_many_lines(factory, reader, readers.kept(source_id, reader), encoder)
        return estimate, TokenCurve.of([(estimate.rows, estimate.tokens)])
    counts = readers.row_counts(source_id, reader)
    filled = [shard for shard, rows in enumerate(counts) if rows]
    total = sum(shard.size for shard in reader.shards)
    strata = list(_strata(filled if total <= READ_BYTES else _spread(filled), counts, places))
    budget = _Budget.of(total, len(strata))
    by_stratum, lengths = [], []
    for stratum in strata:
        sample = _sample(readers.kept(source_id, reader), encoder, stratum, budget)
        by_stratum.append(sample.all_tokens(factory) * stratum.rows / sample.rows)
        lengths.append(sample.lengths)
    stood_for, rows = sum(stratum.rows for stratum in strata), sum(counts)
    tokens = sum(by_stratum, Fraction(0))
    sample_tokens = _scaled(factory, tokens, lengths)
    estimate = SizeEstimate(rows, round(1000 * sample_tokens / stood_for))
    # What was not looked at is as what was.
    edges = [total * rows // stood_for for total in accumulate((stratum.rows for stratum in strata), initial=0)]
    scale = float(sample_tokens / tokens * rows / stood_for) if tokens else 0.0
    return estimate, TokenCurve.of(
        (end - begin, float(own) * scale) for (begin, end), own in zip(pairwise(edges), by_stratum, strict=True)
    )


def _of_many_lines(factory: PipelineFactory, reader: LinesSource, kept: Source, encoder: Encoder) -> SizeEstimate:
    """Measured at the heads of some shards: to find lines elsewhere, whole files would have to be scanned."""
    rows = size = 0
    tokens, lengths = Fraction(0), []
    # No file with a line is smaller than a byte order mark and it.
    filled = [shard for shard, file in enumerate(reader.shards) if file.size > len(BOM)]
    chosen, total = _spread(filled), sum(shard.size for shard in reader.shards)
    budget = _Budget.of(total, len(chosen))
    for shard in chosen:
        sample = _sample(kept, encoder, _Stratum(shard, 0, sys.maxsize), budget)
        if not sample.rows:
            continue  # a compressed file may hold nothing
        rows += sample.rows
        tokens += sample.all_tokens(factory)
        lengths.append(sample.lengths)
        size += reader.head_bytes(shard, sample.rows)
    # Rows and tokens by the bytes they take: how long lines are is what differs most from place to place.
    return SizeEstimate(
        max(1, round(Fraction(total * rows, size))), round(1000 * _scaled(factory, tokens, lengths) / rows)
    )


def _strata(chosen: list[int], counts: list[int], places: int) -> Iterator[_Stratum]:
    parts = max(1, places // len(chosen))
    for shard in chosen:
        edges = [counts[shard] * part // parts for part in range(parts + 1)]
        for begin, end in pairwise(edges):
            if begin < end:
                yield _Stratum(shard, begin, end - begin)


def _spread(shards: list[int]) -> list[int]:
    """At most ``MOST_PLACES`` of them, from the middle of as many equal parts."""
    places = min(len(shards), MOST_PLACES)
    return [shards[(2 * place + 1) * len(shards) // (2 * places)] for place in range(places)]


def _sample(reader: Source, encoder: Encoder, stratum: _Stratum, budget: _Budget) -> _Sample:
    """The first rows of a stratum, up to the one with which they reach what may be read: leaving that one out would
    leave out long rows more often than short ones."""
    rows = size = encoded_rows = encoded_bytes = 0
    lengths = []
    for piece in reader.read(stratum.shard, stratum.row):
        column = piece.column[: stratum.rows - rows]
        column = column[: columns.reach(column, budget.read - size).rows]
        if encoded_bytes < budget.encoded:
            part = columns.reach(column, budget.encoded - encoded_bytes)
            ends = encoder.encode(column[: part.rows], piece.first_row, stratum.shard).ends
            lengths.append(np.diff(ends, prepend=0))
            encoded_rows += part.rows
            encoded_bytes += part.bytes
        rows += len(column)
        size += columns.reach(column, budget.read).bytes
        if rows == stratum.rows or size >= budget.read:
            break
    return _Sample(rows, size, encoded_rows, encoded_bytes, np.concatenate(lengths))

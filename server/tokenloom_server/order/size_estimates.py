"""How much a source has: the rows of one epoch, and the tokens of a row, without reading it.

Rows are counted by what files say of themselves: footers, headers, and the lines of text where that is little. Of
larger text, and for the tokens, a few places are read and stand for the rest. The same files and tokeniser give the
same numbers on any machine, whatever is cached: policies decide by them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.mixing.totals import rows_of
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.best_fit import Window, windowed_samples
from tokenloom_server.packing.reading import shuffled_files
from tokenloom_server.packing.unpacked import unpacked_samples
from tokenloom_server.sources import columns
from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.sources.files import codec_of
from tokenloom_server.sources.lines import BOM, LinesSource
from tokenloom_server.sources.sharded import no_rows
from tokenloom_server.sources.wrapped import WrappedSource
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
    """Consecutive ``rows`` of a shard, of which some, from ``row`` on, are read and stand for the others."""

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


def _filled(factory: PipelineFactory, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many ids of each sample are documents', where samples are padded; ``lengths``: the tokens of each row."""
    config = factory.config
    if config.packing == "best_fit":
        window = Window(config.pack_window_rows, config.pack_window_tokens)
        return windowed_samples(lengths, factory.form, window)
    return unpacked_samples(lengths, factory.form, splits=config.long_rows == "split")


def _sample_tokens(factory: PipelineFactory, lengths: npt.NDArray[np.int64]) -> int:
    """Tokens that the samples of consecutive rows count; ``lengths``: the tokens of each row."""
    if factory.config.packing == "concat":
        return int(lengths.sum())
    return factory.config.sequence_length * len(_filled(factory, lengths))


def _real_part(factory: PipelineFactory, lengths: npt.NDArray[np.int64]) -> Fraction:
    """Of the tokens that the samples of consecutive rows count, the part that is real."""
    real = int(factory.form.real_tokens(_filled(factory, lengths)).sum())
    return Fraction(real, max(1, _sample_tokens(factory, lengths)))


def _scaled(factory: PipelineFactory, tokens: Fraction, lengths: npt.NDArray[np.int64]) -> Fraction:
    """What the samples of rows with so many tokens count, by those rows whose ``lengths`` are known."""
    total = int(lengths.sum())
    if factory.config.packing == "none" or not total:
        return tokens
    return tokens * Fraction(_sample_tokens(factory, lengths), total)


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


class _Onwards(WrappedSource):
    """Another source, read at one place after the other: what comes next in a block is read on, and not from the
    block's beginning again."""

    _shard = -1
    _last: Rows
    _rest: Iterator[Rows]

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        """From a row on that does not lie before the piece that was given last."""
        if shard != self._shard or row > self._near():
            self._shard, self._rest = shard, super().read(shard, row)
        else:
            self._rest = chain([self._last], self._rest)
        for rows in self._rest:
            self._last = rows
            skipped = max(0, row - rows.first_row)
            if skipped < len(rows.column):
                yield rows.cut(skipped, len(rows.column))

    def _near(self) -> int:
        """The last row that no block's beginning is nearer to than the end of what was read last."""
        end, blocks = self._last.first_row + len(self._last.column), self.blocks(self._shard)
        return max(end, int(blocks[np.searchsorted(blocks, end)]) - 1)


def measure(factory: PipelineFactory, source_id: int) -> TokenCurve:
    """Measures one epoch of a source: its rows exactly with ``batching``, for Parquet and Arrow files and little text.

    Reads ``READ_BYTES`` from ``MOST_PLACES`` row groups at most, or a source that has no more, beside footers, headers
    and ``COUNTED_BYTES`` of lines; encodes ``ENCODED_BYTES``. Raises ``SourceError`` and ``TokenizerError`` for a file,
    or a row of the sample, that is not readable.
    """
    readers = factory.readers
    if factory.config.batching is not None:
        epochs = readers.bucket_epochs(source_id)
        return TokenCurve.of([(epochs.batches * epochs.size,) * 2])
    reader = readers.open(source_id)
    encoder, kept = factory.encoder(source_id, reader), readers.kept(source_id, reader)
    total = sum(shard.size for shard in reader.shards)
    # Each place of a remote file costs requests.
    is_whole, is_remote = total <= READ_BYTES, factory.config.sources[source_id].spec.is_remote
    places = MOST_PLACES if is_whole or not is_remote else LEAST_PLACES
    if isinstance(reader, LinesSource) and total > COUNTED_BYTES:
        samples, rows = _many_lines(reader, kept, encoder, places)
        return _estimate(factory, source_id, samples, rows)
    counts = readers.row_counts(source_id, reader)
    if not (filled := [shard for shard, rows in enumerate(counts) if rows]):
        raise no_rows(factory.config.sources[source_id].spec, reader.shards, "have none")
    blocks = reader.blocks if not is_whole else None
    strata = list(_strata(filled if is_whole else _spread(filled), counts, places, blocks))
    budget, reading = _Budget.of(total, len(strata)), _Onwards(kept)
    samples = [(stratum, _sample(reading, encoder, stratum, budget)) for stratum in strata]
    return _estimate(factory, source_id, samples, sum(counts))


def _estimate(
    factory: PipelineFactory, source_id: int, samples: list[tuple[_Stratum, _Sample]], rows: int
) -> TokenCurve:
    """What so many ``rows`` have; those that were not looked at are as those that were."""
    config = factory.config
    parts = [
        (stratum, sample.all_tokens(factory) * stratum.rows / sample.rows, sample)
        for stratum, sample in samples
    ]
    stood_for, tokens = (
        sum(stratum.rows for stratum, _, _ in parts),
        sum((own for _, own, _ in parts), Fraction(0)),
    )
    every = np.concatenate([sample.lengths for _, sample in samples])
    sample_tokens = _scaled(factory, tokens, every) * _unseen_share(factory, source_id, rows)
    order = _reading_order(factory, source_id)
    parts.sort(key=lambda part: order.index(part[0].shard) if order else 0)
    scale = sample_tokens / tokens * rows / stood_for if tokens else Fraction(0)
    row_edges = accumulate((stratum.rows for stratum, _, _ in parts), initial=0)
    token_edges = accumulate((own for _, own, _ in parts), initial=Fraction(0))
    real_edges: Iterable[Fraction] = ()
    if config.balances_real:
        # What is packed together is of a window, which may be longer than what was read of a stratum.
        overall = _real_part(factory, every) if config.packing == "best_fit" else None
        reals = (own * (overall or _real_part(factory, sample.lengths)) for _, own, sample in parts)
        real_edges = accumulate(reals, initial=Fraction(0))
    curve = TokenCurve(
        tuple(edge * rows // stood_for for edge in row_edges),
        tuple(round(edge * scale) for edge in token_edges),
        tuple(round(edge * scale) for edge in real_edges),
    )
    return curve if order else curve.straight()


def _unseen_share(factory: PipelineFactory, source_id: int, rows: int) -> Fraction:
    """Of the rows of all epochs, of ``rows`` each, the part that another loader had not given before."""
    epochs, readers = factory.config.epochs[source_id], factory.readers
    if factory.config.sources[source_id].seen is None or math.isinf(epochs):
        return Fraction(1)
    total = rows_of(rows, epochs)
    seen = sum(map(len, readers.seen(source_id, readers.open(source_id)).values()))
    return Fraction(max(0, total - seen), max(1, total))


def _reading_order(factory: PipelineFactory, source_id: int) -> Sequence[int]:
    """The shards of a source in the order of an epoch; none where rows come in an order that mixes them, so that
    everywhere they are as long as on average."""
    config, source = factory.config, factory.config.sources[source_id]
    shards, epochs = range(len(factory.record.shards[source_id])), config.epochs[source_id]
    if source.shuffle == "shards" and source.lanes == 1 and len(shards) <= MOST_PLACES:
        # That of the last epoch, in which it comes to its end.
        return shuffled_files(
            len(shards), config.seed, source_id, 0 if math.isinf(epochs) else math.ceil(epochs) - 1
        )
    return shards if source.in_file_order else ()


def _many_lines(
    reader: LinesSource, kept: Source, encoder: Encoder, places: int
) -> tuple[list[tuple[_Stratum, _Sample]], int]:
    """What was measured, at some bytes of some shards, of compressed ones at the head: to find lines by their numbers,
    whole files would have to be scanned. And about how many rows there are."""
    # No file with a line is smaller than a byte order mark and it.
    filled = [shard for shard, file in enumerate(reader.shards) if file.size > len(BOM)]
    chosen, sizes = _spread(filled), [shard.size for shard in reader.shards]
    reader.by_bytes = places == MOST_PLACES and not any(
        codec_of(reader.shards[shard].path) for shard in chosen
    )
    parts = list(_strata(chosen, sizes, places if reader.by_bytes else 1))
    budget = _Budget.of(sum(sizes), len(parts))
    samples, size = [], 0
    for part in parts:
        row = part.row + max(0, part.rows - budget.read) // 2 if reader.by_bytes else part.row
        sample = _sample(kept, encoder, _Stratum(part.shard, row, sys.maxsize), budget)
        if not sample.rows:
            continue  # a compressed file may hold nothing
        # Rows and tokens by the bytes they take: how long lines are is what differs most from place to place.
        read = reader.bytes_of(part.shard, row, sample.rows)
        rows = max(1, round(Fraction(part.rows * sample.rows, read)))
        samples.append((part._replace(rows=rows), sample))
        size += part.rows
    return samples, max(
        1, round(Fraction(sum(sizes) * sum(stratum.rows for stratum, _ in samples), size))
    )


def _strata(
    chosen: list[int],
    counts: list[int],
    places: int,
    blocks: Callable[[int], npt.NDArray[np.int64]] | None = None,
) -> Iterator[_Stratum]:
    """Of each chosen shard equal parts; read in the middle, where a block begins, if ``blocks`` say that one does."""
    parts = max(1, places // len(chosen))
    for shard in chosen:
        edges = [counts[shard] * part // parts for part in range(parts + 1)]
        for begin, end in pairwise(edges):
            if begin < end:
                middle = (begin + end) // 2
                row = (
                    0
                    if blocks is None
                    else int(blocks(shard)[np.searchsorted(blocks(shard), middle, "right") - 1])
                )
                yield _Stratum(shard, max(begin, row), end - begin)


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
    return _Sample(
        rows, size, encoded_rows, encoded_bytes, np.concatenate([np.zeros(0, np.int64), *lengths])
    )

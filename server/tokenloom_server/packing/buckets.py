"""Batches of rows that are ready tensors: each from one bucket of the source, in an order that is computed.

An epoch's batches are drawn without replacement: the sequence of buckets is a seeded permutation of all full batches
(sorted by keyed numbers), so that at any point the next bucket is drawn in proportion to the batches left in it. The
i-th batch of a bucket takes that bucket's i-th ``size`` rows: in the order of the files, which are then read nearly in
order whatever the buckets are, or shuffled within windows by a keyed permutation. What is left of a bucket fills no
batch and is lost for the epoch. A cursor is the epoch and how many of its rows were given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.batching import BatchingConfig
from tokenloom_server.core.hashing import Permutation, Purpose, draw, stream
from tokenloom_server.core.numbers import whole_and_part
from tokenloom_server.core.state import EpochCursor, SourceState
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.base import Batch, Block, BlockOrigins, Feature
from tokenloom_server.packing.samples import Int64s, Sample, hashed
from tokenloom_server.sources.tensor_buckets import BucketIndex
from tokenloom_server.sources.tensor_source import FeatureSource
from tokenloom_server.sources.tensors import BINARY, STORED_AS, STRING, Column, Values

_Bytes = npt.NDArray[np.uint8]


class Epochs:
    """How many batches each epoch of a source has, and which buckets they come from. Pure, but that it remembers the
    epoch that was asked for last."""

    def __init__(
        self,
        index: BucketIndex,
        *,
        size: int,
        seed: int,
        source_id: int,
        epochs: float,
        window_rows: int | None = None,
    ) -> None:
        """``size``: samples of a batch; ``epochs``: a fraction stands for that part of the last one's batches.
        ``window_rows``: a bucket's rows are shuffled within so many; None: they come in the order of the files."""
        self._window = window_rows
        self.index = index
        self.size = size
        self._seed = seed
        self._source_id = source_id
        self._whole, self._fraction = whole_and_part(epochs)
        self._last: tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None

    @property
    def batches(self) -> int:
        """How many batches a whole epoch has."""
        return int(self.index.batches(self.size).sum())

    @property
    def lost_rows(self) -> int:
        """Rows of a whole epoch that are in no batch."""
        return self.index.row_count - self.batches * self.size

    def count(self, epoch: int) -> int:
        """The batches of an epoch; 0 after the last."""
        if epoch < self._whole:
            return self.batches
        return math.floor(self._fraction * self.batches) if epoch == self._whole else 0

    def lost_in(self, epoch: int) -> int:
        """The rows that an epoch loses: those of one that is only read in part are not asked for."""
        return self.lost_rows if epoch < self._whole else 0

    def rows_of(self, epoch: int, batch: int) -> tuple[Int64s, Int64s]:
        """The rows of an epoch's batch, counted from 0: each one's shard, and its row in the shard; [size] both."""
        buckets, before = self.drawn(epoch)
        bucket, begin = int(buckets[batch]), int(before[batch]) * self.size
        numbers = np.arange(begin, begin + self.size)
        return self.index.take(
            bucket, numbers if self._window is None else self._shuffled(epoch, bucket, numbers)
        )

    def _shuffled(self, epoch: int, bucket: int, numbers: Int64s) -> Int64s:
        """Where the rows lie in their bucket that have some numbers in its shuffled order: whole windows in a drawn
        order, what is left after them, and the rows of each in a drawn order."""
        assert self._window is not None
        count, width = int(self.index.counts[bucket]), self._window
        # A key for each bucket, whatever number others have in front of it.
        key = draw(
            draw(self._seed, Purpose.BUCKET, self._source_id, epoch), Purpose.ROWS, bucket, 0
        )
        whole = count // width
        rows = np.empty_like(numbers)
        for turn in np.unique(numbers // width).tolist():
            own = numbers // width == turn
            window = (
                int(Permutation(Purpose.BLOCKS, key, whole)(np.array([turn]))[0])
                if turn < whole
                else turn
            )
            begin = window * width
            key_of_window = draw(key, Purpose.ROWS, window, 1)
            permutation = Permutation(Purpose.ROWS, key_of_window, min(width, count - begin))
            rows[own] = begin + permutation(numbers[own] - turn * width)
        return rows

    def drawn(self, epoch: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """For each batch of a whole epoch in turn: its bucket, and how many batches of that bucket came before it.
        [batches] both."""
        last = self._last
        if last is not None and last[0] == epoch:
            return last[1:]
        counts = self.index.batches(self.size)
        total = int(counts.sum())
        key = draw(self._seed, Purpose.BUCKET, self._source_id, epoch)
        order = np.argsort(stream(key, np.arange(total, dtype=np.uint64)), kind="stable")
        buckets = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        # The number of each among those of its bucket: sorted by bucket they are consecutive.
        by_bucket = np.argsort(buckets, kind="stable")
        before = np.empty(total, np.int32)
        before[by_bucket] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        self._last = epoch, buckets, before
        return buckets, before


class BucketPacker:
    """Implements ``Packer``: each block is one batch."""

    def __init__(
        self,
        name: str,
        source: FeatureSource,
        epochs: Epochs,
        state: SourceState,
        *,
        source_id: int,
        batching: BatchingConfig,
    ) -> None:
        self._name = name
        self._source = source
        self._epochs = epochs
        self._state = state
        self._source_id = source_id
        self._batching = batching
        #: What fills no batch is counted epoch by epoch, in ``lost_tokens``.
        self.dropped_tokens = 0

    def blocks(self) -> Iterator[Block]:
        epochs, state, size = self._epochs, self._state, self._epochs.size
        cursor = state.cursor if isinstance(state.cursor, EpochCursor) else EpochCursor(0, 0)
        epoch, (done, rest) = cursor.epoch, divmod(cursor.rows, size)
        if rest:
            raise SourceError(
                f"{self._name}: the state stands at row {cursor.rows} of epoch {epoch}, within a batch of "
                f"{size}: it is not a state of this run"
            )
        samples, rows, row_counts = state.samples, state.rows, state.row_counts
        # Where no bucket has a full batch, no epoch has one.
        while epochs.batches:
            count = epochs.count(epoch)
            if not count:
                return
            buckets, _ = epochs.drawn(epoch)
            for number in range(done, count):
                ids, batch = self._batch(int(buckets[number]), *epochs.rows_of(epoch, number))
                cursors = np.zeros((size, 5), np.int64)
                cursors[:, 0] = epoch
                cursors[:, 2] = number * size + np.arange(1, size + 1)
                cursors[:, 4] = rows + np.arange(1, size + 1)
                counts = np.array([row_counts], np.int64)
                if number == count - 1 and epochs.lost_in(epoch):
                    lost = row_counts.lost_tokens + epochs.lost_in(epoch)
                    row_counts = row_counts._replace(lost_tokens=lost)
                    counts = np.append(np.repeat(counts, size - 1, axis=0), [row_counts], axis=0)
                origins = BlockOrigins(
                    length=1,
                    first_sample=samples,
                    cursors=cursors,
                    starts=np.empty(0, np.uint32),
                    bounds=np.zeros(size + 1, np.int64),
                    row_counts=counts,
                    make_cursor=_cursor,
                    batch=batch,
                )
                yield Block(ids, hashed(ids, self._source_id), origins)
                samples, rows = samples + size, rows + size
            epoch, done = epoch + 1, 0

    def _batch(self, bucket: int, shards: Int64s, rows: Int64s) -> tuple[list[Sample], Batch]:
        key, source = self._epochs.index.keys[bucket], self._source
        values_of_columns = source.take(shards, rows)
        edge, lengths = None, None
        padded = self._batching.padded
        if padded:
            edge = int(key)
            names = [column.name for column in source.columns]
            lengths = values_of_columns[names.index(self._batching.bucket_column)].dims[:, 0]
        features: list[Feature] = []
        for column, values in zip(source.columns, values_of_columns, strict=True):
            if not column.is_tensor:
                features.append(Feature(column.name, column.dtype, ()))
                continue
            pads = column.name in padded
            if pads and lengths is not None:
                self._check_lengths(column, values, lengths, shards, rows)
            shape = self._shape(key, column, values, shards, rows, edge if pads else None)
            features.append(Feature(column.name, column.dtype, shape))
        if lengths is not None:
            features.append(Feature(f"{self._batching.bucket_column}_length", "int64", ()))
        return _samples(source.columns, values_of_columns, features, lengths), Batch(
            key, tuple(features)
        )

    def _shape(
        self,
        key: str,
        column: Column,
        values: Values,
        shards: Int64s,
        rows: Int64s,
        edge: int | None,
    ) -> tuple[int, ...]:
        """The one shape of a column in a batch; ``edge``: what its first dimension is padded to. Raises
        ``SourceError`` naming a row that has another."""
        dims = values.dims[:, 1:] if edge is not None else values.dims
        # Of a row without items, the dimensions after the first one are not known.
        known = values.sizes > 0 if edge is not None else np.ones(len(dims), np.bool_)
        first = int(np.argmax(known))
        different = np.flatnonzero(known & (dims != dims[first]).any(axis=1))
        if len(different):
            other = int(different[0])
            raise SourceError(
                f"{self._where(shards, rows, other)}: column {column.name!r} has the shape "
                f"{values.dims[other].tolist()}, but {self._where(shards, rows, first)} of the same bucket {key!r} has "
                f"{values.dims[first].tolist()}: a batch has one shape. Choose a bucket_by that tells them apart, pad "
                "the column (batching.pad), or leave it out of batching.columns"
            )
        shape = tuple(dims[first].tolist())
        return shape if edge is None else (edge, *shape)

    def _check_lengths(
        self, column: Column, values: Values, lengths: Int64s, shards: Int64s, rows: Int64s
    ) -> None:
        if not values.dims.shape[1]:
            raise SourceError(
                f"{self._name}: column {column.name!r} is to be padded, but it holds no lists"
            )
        different = np.flatnonzero(values.dims[:, 0] != lengths)
        if len(different):
            first = int(different[0])
            raise SourceError(
                f"{self._where(shards, rows, first)}: column {column.name!r} has the length "
                f"{values.dims[first, 0]}, but column {self._batching.bucket_column!r} has {lengths[first]}; columns "
                "that are padded together are equally long: leave it out of batching.pad"
            )

    def _where(self, shards: Int64s, rows: Int64s, index: int) -> str:
        return f"{self._source.where(int(shards[index]))}: row {rows[index]}"


def size_of(batch: Batch, data: Sample) -> int:
    """The bytes of the sample of a batch that some bytes begin with."""
    begin = text_bytes = 0
    for feature in batch.features:
        if feature.dtype in (STRING, BINARY):
            text_bytes += int.from_bytes(data[begin : begin + feature.bytes], "little")
        begin += feature.bytes
    return begin + text_bytes


def described(batch: Batch, sample: Sample) -> dict[str, Any]:
    """A sample for people: numbers and texts as they are, of tensors and binary what they are."""
    fields: dict[str, Any] = {}
    begin, tail = 0, sum(feature.bytes for feature in batch.features)
    for feature in batch.features:
        part = bytes(sample[begin : begin + feature.bytes])
        begin += feature.bytes
        if feature.dtype in (STRING, BINARY):
            size = int.from_bytes(part, "little")
            text = bytes(sample[tail : tail + size])
            tail += size
            fields[feature.name] = (
                text.decode(errors="replace") if feature.dtype == STRING else f"{size} bytes"
            )
        elif feature.shape or feature.dtype in STORED_AS:
            fields[feature.name] = f"{feature.dtype} {list(feature.shape)}"
        else:
            fields[feature.name] = np.frombuffer(part, feature.dtype)[0].item()
    return fields


def _samples(
    columns: Sequence[Column],
    values_of_columns: Sequence[Values],
    features: Sequence[Feature],
    lengths: Int64s | None,
) -> list[Sample]:
    """Each sample's bytes: the tensors, and the sizes of texts (uint32), one after the other; then the texts."""
    fixed = sum(feature.bytes for feature in features)
    sizes = np.full(len(values_of_columns[0].sizes), fixed, np.int64)
    for column, values in zip(columns, values_of_columns, strict=True):
        if not column.is_tensor:
            sizes += values.sizes
    ends = np.cumsum(sizes)
    begins = ends - sizes
    # What is not written below is padding.
    out = np.empty(ends[-1], np.uint8) if lengths is None else np.zeros(ends[-1], np.uint8)
    next_bytes, tails = begins, begins + fixed
    for column, values, feature in zip(columns, values_of_columns, features, strict=False):
        if column.is_tensor:
            values.copy_to(out, next_bytes)
        else:
            _put(out, next_bytes, values.sizes, "<u4")
            values.copy_to(out, tails)
            tails = tails + values.sizes
        next_bytes = next_bytes + feature.bytes
    if lengths is not None:
        _put(out, next_bytes, lengths, "<i8")
    out.flags.writeable = False
    return [out[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _put(out: _Bytes, begins: Int64s, numbers: Int64s, dtype: str) -> None:
    """Writes a number of each sample, from ``begins`` [n] on."""
    written = numbers.astype(dtype).view(np.uint8).reshape(len(numbers), -1)
    out[begins[:, None] + np.arange(written.shape[1])] = written


def _cursor(epoch: int, part: int, rows: int, count: int) -> EpochCursor:
    return EpochCursor(epoch, rows)

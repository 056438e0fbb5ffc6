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
from fractions import Fraction
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tokenloom_server.core.hashing import Purpose, draw, stream
from tokenloom_server.core.state import EpochCursor, RowCounts, SourceState
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.base import Batch, Block, Feature, SampleOrigins
from tokenloom_server.packing.permutation import Permutation
from tokenloom_server.sources.tensors.buckets import BucketIndex
from tokenloom_server.sources.tensors.column import BINARY, STORED_AS, STRING, Column
from tokenloom_server.sources.tensors.decoded import Values
from tokenloom_server.sources.tensors.source import FeatureSource

_Int64s = npt.NDArray[np.int64]
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
        exact = Fraction(0) if math.isinf(epochs) else Fraction(repr(epochs))
        self._whole = math.inf if math.isinf(epochs) else math.floor(exact)
        self._fraction = exact - math.floor(exact)
        self._last: tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None

    @property
    def batches(self) -> int:
        """Of a whole epoch."""
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

    def rows_of(self, epoch: int, batch: int) -> tuple[_Int64s, _Int64s]:
        """Of an epoch's batch, counted from 0, shard and row in shard of each sample, [size] both."""
        buckets, before = self.drawn(epoch)
        bucket, begin = int(buckets[batch]), int(before[batch]) * self.size
        places = np.arange(begin, begin + self.size)
        return self.index.take(bucket, places if self._window is None else self._shuffled(epoch, bucket, places))

    def _shuffled(self, epoch: int, bucket: int, places: _Int64s) -> _Int64s:
        """Where the rows lie in their bucket that come at some places of its shuffled order: whole windows in a drawn
        order, what is left after them, and the rows of each in a drawn order."""
        assert self._window is not None
        count, width = int(self.index.counts[bucket]), self._window
        # A key for each bucket, whatever number others have in front of it.
        key = draw(draw(self._seed, Purpose.BUCKET, self._source_id, epoch), Purpose.ROWS, bucket, 0)
        whole = count // width
        found = np.empty_like(places)
        for window in np.unique(places // width).tolist():
            own = places // width == window
            at = int(Permutation(Purpose.BLOCKS, key, whole)(np.array([window]))[0]) if window < whole else window
            rows = min(width, count - at * width)
            permutation = Permutation(Purpose.ROWS, draw(key, Purpose.ROWS, at, 1), rows)
            found[own] = at * width + permutation(places[own] - window * width)
        return found

    def drawn(self, epoch: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Of each batch of a whole epoch in turn, its bucket, and the number of that bucket's batches before it."""
        last = self._last
        if last is not None and last[0] == epoch:
            return last[1:]
        counts = self.index.batches(self.size)
        total = int(counts.sum())
        key = draw(self._seed, Purpose.BUCKET, self._source_id, epoch)
        order = np.argsort(stream(key, np.arange(total, dtype=np.uint64)), kind="stable")
        buckets = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        # The place of each among those of its bucket: sorted by bucket they are consecutive.
        by_bucket = np.argsort(buckets, kind="stable")
        before = np.empty(total, np.int32)
        before[by_bucket] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        self._last = epoch, buckets, before
        return buckets, before


class Padding(Protocol):
    """Which columns are padded, by the length of which."""

    @property
    def padded(self) -> frozenset[str]: ...

    @property
    def bucket_column(self) -> str: ...


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
        padding: Padding,
    ) -> None:
        self._name = name
        self._source = source
        self._epochs = epochs
        self._state = state
        self._source_id = source_id
        self._padding = padding
        #: What fills no batch is tallied epoch by epoch.
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
        samples, rows, tally = state.samples, state.rows, state.tally
        # Where no bucket has a full batch, no epoch has one.
        while epochs.batches:
            count = epochs.count(epoch)
            if not count:
                return
            buckets, _ = epochs.drawn(epoch)
            for at in range(done, count):
                ids, batch = self._batch(int(buckets[at]), *epochs.rows_of(epoch, at))
                earlier = tally
                if at == count - 1:
                    tally = tally._replace(lost_tokens=tally.lost_tokens + epochs.lost_in(epoch))
                yield Block(
                    ids,
                    list(map(xxhash.xxh3_128_intdigest, ids, repeat(self._source_id))),
                    _places(epoch, at, size, samples, rows, earlier, tally, batch),
                )
                samples, rows = samples + size, rows + size
            epoch, done = epoch + 1, 0

    def _batch(self, bucket: int, shards: _Int64s, rows: _Int64s) -> tuple[list[memoryview], Batch]:
        key, source = self._epochs.index.keys[bucket], self._source
        found = source.take(shards, rows)
        edge, lengths = None, None
        padded = self._padding.padded
        if padded:
            edge = int(key)
            at = next(i for i, column in enumerate(source.columns) if column.name == self._padding.bucket_column)
            lengths = found[at].dims[:, 0]
        features: list[Feature] = []
        for column, values in zip(source.columns, found, strict=True):
            if not column.is_tensor:
                features.append(Feature(column.name, column.dtype, ()))
                continue
            pads = column.name in padded
            if pads and lengths is not None:
                self._check_lengths(column, values, lengths, shards, rows)
            shape = self._shape(key, column, values, shards, rows, edge if pads else None)
            features.append(Feature(column.name, column.dtype, shape))
        if lengths is not None:
            features.append(Feature(f"{self._padding.bucket_column}_length", "int64", ()))
        return _samples(source.columns, found, features, lengths), Batch(key, tuple(features))

    def _shape(
        self, key: str, column: Column, values: Values, shards: _Int64s, rows: _Int64s, edge: int | None
    ) -> tuple[int, ...]:
        """The one shape of a column in a batch; ``edge``: what its first dimension is padded to. Raises
        ``SourceError`` naming a row that has another."""
        dims = values.dims[:, 1:] if edge is not None else values.dims
        # Of a row without items, the dimensions after the first one are not known.
        known = values.sizes > 0 if edge is not None else np.ones(len(dims), np.bool_)
        first = int(np.argmax(known))
        different = np.flatnonzero(known & (dims != dims[first]).any(axis=1))
        if len(different):
            at = int(different[0])
            raise SourceError(
                f"{self._where(shards, rows, at)}: column {column.name!r} has the shape {_text(values.dims[at])}, but "
                f"{self._where(shards, rows, first)} of the same bucket {key!r} has {_text(values.dims[first])}: a "
                "batch has one shape. Choose a bucket_by that tells them apart, pad the column (batching.pad), or "
                "leave it out of batching.columns"
            )
        shape = tuple(dims[first].tolist())
        return shape if edge is None else (edge, *shape)

    def _check_lengths(self, column: Column, values: Values, lengths: _Int64s, shards: _Int64s, rows: _Int64s) -> None:
        if not values.dims.shape[1]:
            raise SourceError(f"{self._name}: column {column.name!r} is to be padded, but it holds no lists")
        different = np.flatnonzero(values.dims[:, 0] != lengths)
        if len(different):
            at = int(different[0])
            raise SourceError(
                f"{self._where(shards, rows, at)}: column {column.name!r} has the length {values.dims[at, 0]}, but "
                f"column {self._padding.bucket_column!r} has {lengths[at]}; columns that are padded together are "
                "equally long: leave it out of batching.pad"
            )

    def _where(self, shards: _Int64s, rows: _Int64s, at: int) -> str:
        return f"{self._source.where(int(shards[at]))}: row {rows[at]}"


def _text(dims: _Int64s) -> str:
    return str(dims.tolist())


def size_of(batch: Batch, data: bytes | memoryview) -> int:
    """The bytes of the sample of a batch that some bytes begin with."""
    at = size = 0
    for feature in batch.features:
        if feature.dtype in (STRING, BINARY):
            size += int.from_bytes(data[at : at + feature.bytes], "little")
        at += feature.bytes
    return at + size


def described(batch: Batch, sample: bytes | memoryview) -> dict[str, Any]:
    """A sample for people: numbers and texts as they are, of tensors and binary what they are."""
    found: dict[str, Any] = {}
    at, tail = 0, sum(feature.bytes for feature in batch.features)
    for feature in batch.features:
        part = bytes(sample[at : at + feature.bytes])
        at += feature.bytes
        if feature.dtype in (STRING, BINARY):
            size = int.from_bytes(part, "little")
            text = bytes(sample[tail : tail + size])
            tail += size
            found[feature.name] = text.decode(errors="replace") if feature.dtype == STRING else f"{size} bytes"
        elif feature.shape or feature.dtype in STORED_AS:
            found[feature.name] = f"{feature.dtype} {list(feature.shape)}"
        else:
            found[feature.name] = np.frombuffer(part, feature.dtype)[0].item()
    return found


def _samples(
    columns: Sequence[Column],
    found: Sequence[Values],
    features: Sequence[Feature],
    lengths: _Int64s | None,
) -> list[memoryview]:
    """Each sample's bytes: the tensors, and the sizes of texts (uint32), one after the other; then the texts."""
    fixed = sum(feature.bytes for feature in features)
    sizes = np.full(len(found[0].sizes), fixed, np.int64)
    for column, values in zip(columns, found, strict=True):
        if not column.is_tensor:
            sizes += values.sizes
    ends = np.cumsum(sizes)
    begins = ends - sizes
    # What is not written below is padding.
    out = np.empty(ends[-1], np.uint8) if lengths is None else np.zeros(ends[-1], np.uint8)
    at, tails = begins, begins + fixed
    for column, values, feature in zip(columns, found, features, strict=False):
        if column.is_tensor:
            values.copy_to(out, at)
        else:
            _put(out, at, values.sizes, "<u4")
            values.copy_to(out, tails)
            tails = tails + values.sizes
        at = at + feature.bytes
    if lengths is not None:
        _put(out, at, lengths, "<i8")
    wire = out.data.toreadonly()
    return [wire[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _put(out: _Bytes, begins: _Int64s, numbers: _Int64s, dtype: str) -> None:
    """Writes a number of each sample to its place."""
    written = numbers.astype(dtype).view(np.uint8).reshape(len(numbers), -1)
    out[begins[:, None] + np.arange(written.shape[1])] = written


def _places(
    epoch: int, batch: int, size: int, samples: int, rows: int, before: RowCounts, behind: RowCounts, of: Batch
) -> SampleOrigins:
    cursors = np.zeros((size, 5), np.int64)
    numbers = np.arange(1, size + 1)
    cursors[:, 0] = epoch
    cursors[:, 2] = batch * size + numbers
    cursors[:, 4] = rows + numbers
    tallies = np.array([before] if before == behind else [before] * (size - 1) + [behind], np.int64)
    return SampleOrigins(
        length=1,
        first_sample=samples,
        cursors=cursors,
        starts=np.empty(0, np.uint32),
        bounds=np.zeros(size + 1, np.int64),
        tallies=tallies,
        make_cursor=_cursor,
        batch=of,
    )


def _cursor(epoch: int, part: int, rows: int, count: int) -> EpochCursor:
    return EpochCursor(epoch, rows)

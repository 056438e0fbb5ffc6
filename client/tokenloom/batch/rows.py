"""From the bytes of one message to batches of rows: columns of one shape each, and texts.

A sample travels as its tensors, one column after the other, and then its texts. A batch's column is copied once,
from the message into memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tokenloom.batch.layout import RawColumn, Samples, StepNumbers
from tokenloom.errors import ProtocolError

_TEXTS = ("string", "binary")
_SIZE_BYTES = 4


class Feature(NamedTuple):
    """A column: ``dtype`` by its torch name and the shape of one sample's tensor, or ``string`` or ``binary``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_text(self) -> bool:
        return self.dtype in _TEXTS

    @property
    def bytes(self) -> int:
        """Of the part of a sample that has one size."""
        return _SIZE_BYTES if self.is_text else math.prod(self.shape) * _item_bytes(self)


class Bucket(NamedTuple):
    """What a step's samples are: ``sample_bytes`` of each, None where all have as many."""

    name: str
    source: str
    features: tuple[Feature, ...]
    sample_bytes: Sequence[int] | None

    @property
    def fixed_bytes(self) -> int:
        """Of a sample, without its texts."""
        return sum(feature.bytes for feature in self.features)


class RowsMessage:
    """The micro-steps of one message, checked: each becomes a batch when it is asked for."""

    def __init__(
        self,
        batch_size: int,
        steps: StepNumbers,
        *,
        data: bytes | memoryview,
        buckets: Sequence[Bucket],
    ) -> None:
        """Raises ``ProtocolError`` where micro-steps, buckets and bytes do not fit."""
        count = len(steps.end_indices)
        if len(buckets) != count or len(steps.source_ids) != count * batch_size:
            raise ProtocolError(
                f"{count} micro-steps of {batch_size} rows have {count} buckets and {count * batch_size} source ids, "
                f"but {len(buckets)} and {len(steps.source_ids)} came"
            )
        self._size = batch_size
        self._steps = steps
        self._samples = Samples(steps, batch_size)
        #: By micro-step, over all ranks.
        self.label_tokens = steps.label_tokens
        self._buckets = buckets
        self._data = np.frombuffer(data, np.uint8)
        self._begins = [0]
        for bucket in buckets:
            self._begins.append(self._begins[-1] + self._step_bytes(bucket, self._begins[-1]))
        if self._begins[-1] != len(self._data):
            raise ProtocolError(
                f"{count} micro-steps have {self._begins[-1]} bytes, but {len(self._data)} came"
            )

    def batch(self, step: int, _: object = None) -> dict[str, Any]:
        """The batch of a micro-step, counted from 0 in the message: by column a ``RawColumn`` or a list, and what
        each batch has beside them. Raises ``ProtocolError``."""
        bucket, size = self._buckets[step], self._size
        data = self._data[self._begins[step] : self._begins[step + 1]]
        ends = np.cumsum(bucket.sample_bytes or [len(data) // size] * size).tolist()
        samples = [data[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        even = data.reshape(size, -1) if bucket.sample_bytes is None else None
        batch: dict[str, Any] = {}
        offset = 0
        # Where the next text of each sample begins.
        tails = [bucket.fixed_bytes] * size
        for feature in bucket.features:
            # A copy in any case: what came must not be written to, and goes as a whole.
            part = np.empty((size, feature.bytes), np.uint8)
            if even is not None:
                part[...] = even[:, offset : offset + feature.bytes]
            else:
                for row, sample in zip(part, samples, strict=True):
                    row[...] = sample[offset : offset + feature.bytes]
            offset += feature.bytes
            if not feature.is_text:
                batch[feature.name] = RawColumn(
                    feature.name, feature.dtype, (size, *feature.shape), part
                )
                continue
            sizes = part.view("<u4")[:, 0].tolist()
            texts = [
                sample[tail : tail + own].tobytes()
                for sample, tail, own in zip(samples, tails, sizes, strict=True)
            ]
            tails = [tail + own for tail, own in zip(tails, sizes, strict=True)]
            batch[feature.name] = (
                [text.decode() for text in texts] if feature.dtype == "string" else texts
            )
        if any(tail != len(sample) for tail, sample in zip(tails, samples, strict=True)):
            raise ProtocolError(
                f"rows of {list(map(len, samples))} bytes came, but their columns have {tails}"
            )
        return batch | {
            **self._samples.of_batch(step),
            "dataset_id": bucket.source,
            "bucket": bucket.name,
            **self._steps.of_batch(step),
        }

    def _step_bytes(self, bucket: Bucket, begin: int) -> int:
        """The bytes of the micro-step that begins there."""
        sizes = bucket.sample_bytes
        if sizes is not None:
            if len(sizes) != self._size or min(sizes) < bucket.fixed_bytes:
                raise ProtocolError(
                    f"{self._size} rows of {bucket.fixed_bytes} bytes or more were expected, but {sizes} came"
                )
            return sum(sizes)
        # All rows have as many. With texts the first row says how many.
        row_bytes, offset = bucket.fixed_bytes, begin
        for feature in bucket.features:
            if feature.is_text:
                row_bytes += int.from_bytes(
                    self._data[offset : offset + _SIZE_BYTES].tobytes(), "little"
                )
            offset += feature.bytes
        return row_bytes * self._size


def _item_bytes(feature: Feature) -> int:
    """Bytes of an item. Raises ``ProtocolError`` for a dtype that nobody knows."""
    if feature.dtype == "bfloat16":
        return 2
    if feature.dtype.startswith("float8"):
        return 1
    try:
        return np.dtype(feature.dtype).itemsize
    except TypeError:
        raise ProtocolError(
            f"column {feature.name!r} is of dtype {feature.dtype!r}, which this client does not know: install the "
            "client of the server's version"
        ) from None

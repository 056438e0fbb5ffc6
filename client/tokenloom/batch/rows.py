"""From the bytes of one message to batches of rows: tensors of one shape each, and texts.

A sample travels as its tensors, one column after the other, and its texts behind them. A batch's column is copied once,
from the message into memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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
        return _SIZE_BYTES if self.is_text else math.prod(self.shape) * _dtype(self).itemsize


class Bucket(NamedTuple):
    """What a step's samples are: ``sample_bytes`` of each, None where all have as many."""

    name: str
    source: str
    features: tuple[Feature, ...]
    sample_bytes: Sequence[int] | None


class RowsMessage:
    """The steps of one message, checked: each becomes a batch when it is asked for."""

    def __init__(
        self,
        batch_size: int,
        *,
        begin_indices: Sequence[int],
        end_indices: Sequence[int],
        slices: Sequence[int],
        total_tokens: Sequence[int],
        tokens: Sequence[int],
        label_tokens: Sequence[int],
        data: bytes | memoryview,
        source_ids: Sequence[int],
        buckets: Sequence[Bucket],
    ) -> None:
        count = len(end_indices)
        if len(buckets) != count or len(source_ids) != count * batch_size:
            raise ProtocolError(
                f"{count} steps of {batch_size} rows have {count} buckets and {count * batch_size} source ids, but "
                f"{len(buckets)} and {len(source_ids)} came"
            )
        self._size = batch_size
        self._begin_indices = begin_indices
        self._end_indices = end_indices
        self._slices = slices
        self._total_tokens = total_tokens
        self._tokens = tokens
        #: By step, over all ranks.
        self.label_tokens = label_tokens
        self._source_ids = source_ids
        self._buckets = buckets
        self._data = np.frombuffer(data, np.uint8)
        self._begins = [0]
        for bucket in buckets:
            fixed = sum(feature.bytes for feature in bucket.features)
            sizes = bucket.sample_bytes
            if sizes is None:
                own = self._even(bucket, self._begins[-1], fixed)
            elif len(sizes) != batch_size or min(sizes) < fixed:
                raise ProtocolError(f"{batch_size} rows of {fixed} bytes or more were expected, but {sizes} came")
            else:
                own = sum(sizes)
            self._begins.append(self._begins[-1] + own)
        if self._begins[-1] != len(self._data):
            raise ProtocolError(f"{count} steps have {self._begins[-1]} bytes, but {len(self._data)} came")

    def batch(self, step: int, _: object = None) -> dict[str, Any]:
        """The batch of a step, counted from 0 in the message: by column a tensor [B, …] or a list, and what each batch
        has beside them. Raises ``ProtocolError``."""
        bucket, size = self._buckets[step], self._size
        data = self._data[self._begins[step] : self._begins[step + 1]]
        fixed = sum(feature.bytes for feature in bucket.features)
        ends = np.cumsum(bucket.sample_bytes or [len(data) // size] * size).tolist()
        samples = [data[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        even = data.reshape(size, -1) if bucket.sample_bytes is None else None
        batch: dict[str, Any] = {}
        at = 0
        tails = [fixed] * size
        for feature in bucket.features:
            # A copy in any case: what came must not be written to, and goes as a whole.
            part = np.empty((size, feature.bytes), np.uint8)
            if even is not None:
                part[...] = even[:, at : at + feature.bytes]
            else:
                for place, sample in enumerate(samples):
                    part[place] = sample[at : at + feature.bytes]
            at += feature.bytes
            if not feature.is_text:
                batch[feature.name] = _tensor(part, feature)
                continue
            sizes = part.view("<u4")[:, 0].tolist()
            texts = [
                sample[tail : tail + own].tobytes() for sample, tail, own in zip(samples, tails, sizes, strict=True)
            ]
            tails = [tail + own for tail, own in zip(tails, sizes, strict=True)]
            batch[feature.name] = [text.decode() for text in texts] if feature.dtype == "string" else texts
        if any(tail != len(sample) for tail, sample in zip(tails, samples, strict=True)):
            raise ProtocolError(f"rows of {list(map(len, samples))} bytes came, but their columns have {tails}")
        sources = self._source_ids[step * size : (step + 1) * size]
        first = self._begin_indices[step] + self._slices[step] * size
        return batch | {
            "source_ids": torch.tensor(sources, dtype=torch.int64),
            "sample_ids": torch.arange(first, first + size),
            "dataset_id": bucket.source,
            "bucket": bucket.name,
            "sample_index": self._end_indices[step],
            "total_tokens": self._total_tokens[step],
            "global_tokens": self._tokens[step],
            "global_label_tokens": self.label_tokens[step],
        }

    def _even(self, bucket: Bucket, begin: int, fixed: int) -> int:
        """The bytes of a step whose rows have as many each. With texts the first row says how many."""
        size = fixed
        at = begin
        for feature in bucket.features:
            if feature.is_text:
                size += int.from_bytes(self._data[at : at + _SIZE_BYTES].tobytes(), "little")
            at += feature.bytes
        return size * self._size


def _dtype(feature: Feature) -> torch.dtype:
    found = getattr(torch, feature.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(
            f"column {feature.name!r} is of dtype {feature.dtype!r}, which torch {torch.__version__} does not have: "
            "install a newer torch, or leave the column out of batching.columns"
        )
    return found


def _tensor(part: NDArray[np.uint8], feature: Feature) -> torch.Tensor:
    shape = (len(part), *feature.shape)
    if not part.shape[1]:
        return torch.empty(shape, dtype=_dtype(feature))
    return torch.from_numpy(part).view(_dtype(feature)).reshape(shape)

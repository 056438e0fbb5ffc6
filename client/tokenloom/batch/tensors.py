"""Batches of tensors on the CPU: those of numpy arrays, over the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tokenloom.batch.arrays import ArrayMaker, Steps
from tokenloom.batch.layout import RawColumn
from tokenloom.errors import ProtocolError


class TensorMaker(ArrayMaker):
    """Makes batches of tensors in ordinary memory that is used again."""

    def batch(self, message: Steps, step: int) -> dict[str, Any]:
        """The batch of a micro-step, counted from 0 in the message."""
        return tensors_of(message.batch(step, self._pool))


def tensors_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with each array and column as a tensor. None is a view of another."""
    tensors = dict(batch)
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            tensors[name] = torch.from_numpy(value)
        elif isinstance(value, RawColumn):
            tensors[name] = _tensor(value)
    return tensors


def _tensor(value: RawColumn) -> torch.Tensor:
    dtype = getattr(torch, value.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(
            f"column {value.name!r} is of dtype {value.dtype!r}, which torch {torch.__version__} does not have: "
            "install a newer torch, or leave the column out of batching.columns"
        )
    if not value.data.size:
        return torch.empty(value.shape, dtype=dtype)
    return torch.from_numpy(value.data).view(dtype).reshape(value.shape)

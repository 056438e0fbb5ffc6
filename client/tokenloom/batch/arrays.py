"""Batches of numpy arrays, and what makes the batches of a launch: a ``BatchMaker``."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenloom.batch.layout import Layout, RawColumn
from tokenloom.batch.packed import ArrayPool, Message
from tokenloom.batch.rows import RowsMessage
from tokenloom.errors import ProtocolError

#: A message that was checked.
Steps: TypeAlias = Message | RowsMessage


class BatchMaker(Protocol):
    """Makes the batches of a launch, in the form that its dataset gives. For one thread at a time, as ``next()`` is."""

    def batch(self, message: Steps, step: int) -> dict[str, Any]:
        """The batch of a micro-step, counted from 0 in the message. Raises ``ProtocolError``."""

    def send(self, message: Steps, step: int) -> None:
        """Begins what can be done for a micro-step that is to be asked for next."""


class ArrayMaker:
    """Makes batches of numpy arrays, in memory that is used again."""

    def __init__(self, layout: Layout) -> None:
        self._pool = ArrayPool.of(layout)

    def batch(self, message: Steps, step: int) -> dict[str, Any]:
        """The batch of a micro-step, counted from 0 in the message."""
        if isinstance(message, Message):
            return {**message.batch(step, self._pool)}
        batch = message.batch(step)
        return {
            name: _array(value) if isinstance(value, RawColumn) else value
            for name, value in batch.items()
        }

    def send(self, message: Steps, step: int) -> None:
        """Nothing: an array is made when it is asked for."""


def _array(column: RawColumn) -> NDArray[Any]:
    """A column as an array over the same memory."""
    return column.data.view(_dtype(column)).reshape(column.shape)


def _dtype(column: RawColumn) -> np.dtype[Any]:
    """numpy's own, or that of ``ml_dtypes``, which JAX brings."""
    try:
        return np.dtype(column.dtype)
    except TypeError:
        pass
    try:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, column.dtype))
        return dtype
    except (ModuleNotFoundError, AttributeError):
        raise ProtocolError(
            f"column {column.name!r} is of dtype {column.dtype!r}, which numpy does not have: pip install -U "
            "ml_dtypes, or leave the column out of batching.columns"
        ) from None

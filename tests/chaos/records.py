"""What a trainer writes down of each batch, as it stands in its file: one record a step, appended by one write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: Tokens of a sample.
LENGTH = 16


def record_type(batch_size: int) -> np.dtype[np.void]:
    """The tensors of one batch, and what the dataset said of it."""
    return np.dtype(
        [
            ("generation", "<i8"),
            ("end", "<i8"),
            ("tokens", "<i8"),
            ("digest", "S32"),
            ("at", "<f8"),
            ("samples", "<i8", (batch_size,)),
            ("sources", "<i2", (batch_size,)),
            ("ids", "<u4", (batch_size, LENGTH)),
        ]
    )


def read_records(path: Path, batch_size: int) -> NDArray[np.void]:
    """All whole records; a trainer that was killed may have left a piece of one behind them."""
    kind = record_type(batch_size)
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data, kind, len(data) // kind.itemsize)


def steps_written(path: Path, batch_size: int) -> int:
    """How many steps a file holds, without reading it."""
    try:
        return path.stat().st_size // record_type(batch_size).itemsize
    except FileNotFoundError:
        return 0

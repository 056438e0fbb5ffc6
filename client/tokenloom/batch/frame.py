"""A batch as one block of bytes, which another process reads in place.

    [numbers, int64 each | tensors, each from a multiple of 8 on]

What a block does not say by itself, names, types and shapes, is its layout: the same for most batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tokenloom.batch.layout import Batch


def frame_layout(batch: Batch) -> dict[str, Any]:
    """How a batch lies in a block, as plain JSON; ``bytes`` is the size of that. Raises ``TypeError`` for a column that
    neither numbers, tensors nor texts are in."""
    layout: dict[str, Any] = {"numbers": [], "tensors": [], "values": {}, "bytes": 0}
    for name, value in batch.items():
        if type(value) is int:
            layout["numbers"].append(name)
            layout["bytes"] += 8
        elif isinstance(value, torch.Tensor):
            layout["tensors"].append(
                [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            )
            layout["bytes"] += _padded(value.numel() * value.itemsize)
        else:
            layout["values"][name] = value
            for item in value if isinstance(value, list) else [value]:
                if not isinstance(item, str | None):
                    raise TypeError(
                        f"column {name!r} has a {type(item).__name__}, which is not handed on to a model-parallel "
                        "peer: leave it out of batching.columns"
                    )
    return layout


def write_frame(batch: Batch, layout: Mapping[str, Any], block: NDArray[np.uint8]) -> None:
    """Copies a batch into a block of ``layout["bytes"]``."""
    columns = cast("dict[str, Any]", batch)
    offset = 8 * len(layout["numbers"])
    block[:offset].view(np.int64)[:] = [columns[name] for name in layout["numbers"]]
    for name, *_ in layout["tensors"]:
        flat = columns[name].detach().reshape(-1).view(torch.uint8)
        torch.from_numpy(block[offset : offset + len(flat)]).copy_(flat)
        offset += _padded(len(flat))


def read_frame(block: NDArray[np.uint8], layout: Mapping[str, Any]) -> Batch:
    """Tensors over the block's memory. None is a view of another, as autograd sees it."""
    numbers = layout["numbers"]
    offset = 8 * len(numbers)
    batch: dict[str, Any] = dict(zip(numbers, block[:offset].view(np.int64).tolist(), strict=True))
    for name, dtype_name, shape in layout["tensors"]:
        dtype = getattr(torch, dtype_name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        batch[name] = torch.from_numpy(block[offset : offset + size]).view(dtype).reshape(shape)
        offset += _padded(size)
    return cast("Batch", batch | layout["values"])


def _padded(size: int) -> int:
    return -(-size // 8) * 8

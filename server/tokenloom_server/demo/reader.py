"""Reads a run without training: the uninterrupted run that the trainers' samples are compared with."""

from __future__ import annotations

import numpy as np
from tokenloom import RemoteDataset

from tokenloom_server.demo.receipts import Receipts, received


def read(url: str, batch_size: int, samples: int) -> Receipts:
    """What one rank receives of the first ``samples`` samples, in steps of ``batch_size``."""
    parts, steps = [], []
    with RemoteDataset(url, batch_size=batch_size, rank=0, world_size=1) as dataset:
        for number, batch in enumerate(dataset, start=1):
            rows, step = received(batch, dataset, number)
            parts.append(rows)
            steps.append(step)
            if dataset.sample_index >= samples:
                break
    return Receipts(np.concatenate(parts), steps)

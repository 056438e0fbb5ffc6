"""Which samples of an epoch Mosaic streaming had read: by its ``state_dict()`` and the library's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenloom_server.errors import ConfigError


def seen_samples(
    state: Mapping[str, Any], folder: Path, arguments: Mapping[str, Any]
) -> npt.NDArray[np.bool_]:
    """Of each sample, whether it was read in the state's epoch. ``arguments``: those of the job's ``StreamingDataset``,
    beside where its data are.

    The library is asked twice: for its order of the whole epoch, and for what it would read after the state. That order
    follows from the canonical nodes alone, whatever nodes, ranks and workers a launch has. Raises ``ConfigError`` where
    the state does not say which samples are left.
    """
    from streaming.base import StreamingDataset

    epoch, read, nodes = (
        state["epoch"],
        state["sample_in_epoch"],
        state["initial_physical_nodes"] or 1,
    )
    dataset: Any = StreamingDataset(**{"batch_size": 1, **arguments, "local": str(folder)})
    dataset.load_state_dict(dict(state))
    before = _work(dataset, nodes, epoch, 0)
    after = _work(dataset, nodes, epoch, read) if read < len(before) else before[:0]
    samples, (_, resampled) = int(dataset.num_samples), dataset.resample_streams(epoch)
    if (
        not np.array_equal(np.sort(resampled), np.arange(samples))
        or len(np.unique(before)) != samples
    ):
        raise ConfigError(
            f"--argument: with these, an epoch is not each of the {samples} samples once (epoch_size, proportion, "
            "repeat, choose, or a batching_method that leaves some out), so its rest is no rest of the data: finish "
            "the epoch there, and begin here with the next one"
        )
    if read % nodes:
        raise ConfigError(
            f"sample_in_epoch: {read} is no multiple of the {nodes} nodes, so it lies within a batch of which the "
            "library would read a part again: give a state that was saved between two batches"
        )
    # The library repeats samples to fill its last batch: one that was read may be in both.
    return np.asarray(
        np.bincount(before, minlength=samples) > np.bincount(after, minlength=samples)
    )


def _work(dataset: Any, nodes: int, epoch: int, read: int) -> Any:
    """The samples that all nodes read of an epoch from one place on, with those that are repeated."""
    from streaming.base.batching import generate_work
    from streaming.base.world import World

    world = World(nodes, 1, 1, 0)
    dataset._resume(world, epoch)
    ids = generate_work(dataset.batching_method, dataset, world, epoch, read).ravel()
    return ids[ids >= 0]

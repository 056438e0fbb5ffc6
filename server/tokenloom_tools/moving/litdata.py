"""Which samples of an epoch LitData had read: by the state of its ``StreamingDataset`` and the library's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenloom_server.errors import ConfigError


def seen_samples(
    state: Mapping[str, Any], folder: Path, arguments: Mapping[str, Any]
) -> npt.NDArray[np.int8]:
    """Of each sample 1 where it was read in the state's epoch, and 2 where it will not be, since the library drops it.
    ``state``: of a ``StreamingDataset`` alone or within that of its ``StreamingDataLoader``; ``arguments``: those of
    the job's, beside what the state says.

    The library is asked for the order in which all ranks and workers read the epoch, which follows from those it began
    on; by the same order it goes on itself on others. Raises ``ConfigError`` where the state does not say what is left.
    """
    from litdata import StreamingDataset
    from litdata.streaming.elastic import sample_in_epoch_from_state
    from litdata.utilities.env import _DistributedEnv, _WorkerEnv

    state = state.get("dataset", state)
    if "block_size" in (state["item_loader"] or {}):
        raise ConfigError(
            f"item_loader: TokensLoader reads blocks of {state['item_loader']['block_size']} ids, which begin and end "
            "within the rows that are read here, so that parts of rows are left: finish the epoch there"
        )
    dataset: Any = StreamingDataset(
        str(folder), **{"shuffle": state["shuffle"], "seed": state["seed"], **arguments}
    )
    chunks = dataset.subsampled_files, [list(part) for part in dataset.region_of_interest]
    if chunks != (state["subsampled_files"], state["region_of_interest"]):
        raise ConfigError(
            "subsampled_files: the job read other chunks than lie here, or a part of them (subsample), so the rest of "
            "its epoch is no rest of the data: finish the epoch there, and begin here with the next one"
        )
    dataset.load_state_dict(dict(state))
    dataset.current_epoch = state["current_epoch"]
    dataset.cache = dataset._create_cache(worker_env=_WorkerEnv.detect())
    dataset.shuffler = dataset._create_shuffler(dataset.cache)
    ranks, workers, batch = (
        state[f"initial_{name}"] for name in ("world_size", "num_workers", "batch_size")
    )
    topology = (
        _DistributedEnv(ranks, 0, state["initial_num_nodes"]),
        workers,
        batch,
        dataset.current_epoch,
    )
    _, intervals = dataset.shuffler.get_chunks_and_intervals_per_workers(*topology)
    shortest = min(sum(end - begin for _, begin, end, _ in own) for own in intervals)
    read = sample_in_epoch_from_state(state)
    if read > shortest // batch * batch * ranks * workers:
        raise ConfigError(
            f"sample_in_epoch: {read} lies within the last batches of the epoch, where a worker's may have fewer "
            f"samples than the {batch} that are counted: finish the epoch there, or give an earlier state"
        )
    (visits,) = dataset._canonical_plans(drop_first=0, num_workers=1, batch_size=1)
    order = [sample for _, samples in visits for sample in samples]
    samples = sum(end - begin for begin, _, _, end in dataset.cache.get_chunk_intervals())
    seen = np.full(samples, 2, np.int8)
    seen[order[:read]], seen[order[read:]] = 1, 0
    return seen

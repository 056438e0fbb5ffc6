"""What another data loader had read of an epoch, as a file of flags and the lines of a mixture file that name it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenloom_proto.files import read_file
from tokenloom_server.config.catalog import Spec
from tokenloom_server.core.numbers import release_of
from tokenloom_server.errors import ConfigError
from tokenloom_server.storage.file import pointer_fault_at


def mosaic_flags(
    state: Mapping[str, Any], folder: Path, arguments: Mapping[str, Any]
) -> npt.NDArray[np.bool_]:
    """Of each sample of Mosaic streaming, whether it was read in the state's epoch. ``arguments``: those of the job's
    ``StreamingDataset``, beside where its data are.

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


def litdata_flags(
    state: Mapping[str, Any], folder: Path, arguments: Mapping[str, Any]
) -> npt.NDArray[np.int8]:
    """Of each sample of LitData 1 where it was read in the state's epoch, and 2 where it will not be, since the library
    drops it. ``state``: of a ``StreamingDataset`` alone or within that of its ``StreamingDataLoader``; ``arguments``:
    those of the job's, beside what the state says.

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


#: By the name of a library: asks it, how to install it, and the first release of which nobody has looked at the parts
#: that are asked and not public.
LIBRARIES = {
    "mosaic": (mosaic_flags, "mosaicml-streaming", "0.14"),
    "litdata": (litdata_flags, "litdata", "0.3"),
}


def write_seen(
    library: str, state: Path, spec: Spec, arguments: dict[str, Any], output: Path
) -> str:
    """Writes the flags of the rows that were read, and gives the source for a mixture file. ``arguments``: of the job's
    dataset. Raises ``ConfigError``, also where the library refuses the state or is not here."""
    flags_of, package, known_before = LIBRARIES[library]
    if fault := pointer_fault_at(state):
        raise ConfigError(f"{str(state)!r} {fault}")
    try:
        installed = version(package)
        if release_of(installed) >= release_of(known_before):
            raise ConfigError(
                f"{library} is asked by parts of it that are not public, and those of {package} {installed} were not "
                f"looked at: pip install '{package}<{known_before}'"
            )
        fields = json.loads(read_file(state))
        flags = np.asarray(flags_of(fields, Path(spec.location), arguments), np.int8)
        np.save(output, flags > 0)
        digest = hashlib.sha256(output.read_bytes()).hexdigest()
    except ImportError as error:
        raise ConfigError(
            f"{library} is asked for its own order, and cannot be imported ({error}): run this where the job ran, or "
            f"pip install '{package}<{known_before}'"
        ) from None
    except KeyError as error:
        raise ConfigError(
            f"{str(state)!r}: the state has no {error}; expected what {library} saves"
        ) from None
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"{library} does not resume from {str(state)!r}: {type(error).__name__}: {error}"
        ) from None
    left, read, dropped = (int(count) for count in np.bincount(flags, minlength=3))
    drops = (
        f"# {dropped:,} are in no batch of this epoch: {library} drops them itself\n"
        if dropped
        else ""
    )
    return (
        f"# {read:,} of {len(flags):,} samples of the epoch were read, and {left:,} are left\n{drops}"
        f"- source: {json.dumps(str(spec))}\n"
        f"  seen: {{file: {json.dumps(str(output))}, sha256: {digest}}}"
    )

"""The ``torch.utils.data.DataLoader`` that is right for a dataset, and what others may not do: each finds out early,
and says what to write."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

#: Options of a DataLoader that are the server's business.
_OF_THE_SERVER = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")
#: Where torch has what makes a DataLoader's iterators, and hands it what it says.
_FETCHERS = "torch.utils.data._utils.fetch"


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for options of a DataLoader that batches which are made already cannot have."""
    for name in _OF_THE_SERVER:
        if name in options:
            raise ValueError(
                f"{name}={options[name]!r}: the server makes batches and their order, so leave it out; the samples "
                "of a batch are the dataset's batch_size"
            )


def loader_of(dataset: IterableDataset[Any], **options: Any) -> DataLoader[Any]:
    """A DataLoader without a worker, whose batches are those of the dataset."""
    # A generator of its own: each iter() of a loader draws a number, and what the model draws has to be what it was
    # without a resume.
    options.setdefault("generator", torch.Generator())
    options.setdefault("collate_fn", unchanged)
    return DataLoader(dataset, batch_size=None, **options)


def unchanged(batch: Any) -> Any:
    """A ``collate_fn`` for batches that are tensors already."""
    return batch


def check(device: torch.device | None, caller: FrameType) -> None:
    """Raises ``RuntimeError`` in one of several workers, in any that would make batches on a GPU, and where ``caller``,
    who calls ``iter()``, is about to stack whole batches to batches of batches: a DataLoader with a batch size and no
    ``collate_fn`` of its own. It says so to nobody but its fetcher, which makes the iterator, so that is looked at."""
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise RuntimeError(
            f"this DataLoader has num_workers={worker.num_workers}, but a rank is one slot of the run and each "
            "worker would claim it. Batches are already fetched in the background: use num_workers=0 (or 1) "
            "and batch_size=None"
        )
    if worker is not None and device is not None and device.type == "cuda":
        raise RuntimeError(
            f"device={str(device)!r} makes batches in the trainer's process, and this is a DataLoader's "
            "worker: use num_workers=0 (batches are fetched in the background all the same), or leave device out"
        )
    # Of no other: to look at a function's variables holds them until it returns.
    if caller.f_globals.get("__name__") != _FETCHERS:
        return
    fetcher = caller.f_locals.get("self")
    if (
        getattr(fetcher, "auto_collation", False)
        and getattr(fetcher, "collate_fn", None) is default_collate
    ):
        raise RuntimeError(
            "this DataLoader makes batches (batch_size=1 unless another is given), but this dataset gives whole "
            "batches already, so tensors would get one dimension more: use dataset.dataloader(), or batch_size=None; "
            "the samples of a rank and step are the dataset's own batch_size"
        )

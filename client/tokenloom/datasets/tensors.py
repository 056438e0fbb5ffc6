"""Datasets whose batches are torch tensors: as what torch takes them, and on which device they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from tokenloom.batch.layout import Batch
from tokenloom.batch.tensors import TensorMaker, Transfer, resolve
from tokenloom.connection.options import ConnectionOptions
from tokenloom.datasets.base import ConnectedDataset, RunUrl, SlotOf

# The ``torch.utils.data.DataLoader`` that is right for a dataset, and what others may not do: each finds out early,
# and says what to write.


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


def check_loader(device: torch.device | None, caller: FrameType) -> None:
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


class TensorBatches(ConnectedDataset, IterableDataset[Batch]):
    """What the datasets of tensors have in common, beside what a dataset of their use has."""

    def __init__(
        self,
        url: RunUrl,
        slot_of: SlotOf,
        connection: ConnectionOptions | None,
        *,
        device: str | torch.device | None,
        **fields: Any,
    ) -> None:
        """``fields``: of the class that says what the dataset is used for."""
        self._device = resolve(device) if device is not None else None
        maker = partial(Transfer, self._device) if self._device is not None else TensorMaker
        super().__init__(url, slot_of, connection, maker=maker, **fields)

    def __iter__(self) -> Iterator[Batch]:
        check_loader(self._device, sys._getframe(1))
        return self._batches()

    def dataloader(self, **options: Any) -> DataLoader[Batch]:
        """The torch ``DataLoader`` that is right for this dataset, for who needs one: a loop over the dataset does not.

        It gives the dataset's batches as they are and has no worker, since batches are fetched in the background in any
        case, and the place in the data stays here: ``state_dict()`` of the dataset. Where batches are on the CPU and
        there is a GPU, their memory is pinned, for ``tensor.to("cuda", non_blocking=True)``. It draws no number of
        torch's default generator, so that what a model draws is the same after a resume.

        ``options`` are further ones of ``DataLoader``, such as ``pin_memory`` or a ``collate_fn``, which is called with
        each batch. Raises ``ValueError`` for those that are the server's business, and for workers.
        """
        check_options(options)
        if options.get("num_workers"):
            raise ValueError(
                f"num_workers={options['num_workers']}: a worker would have the state, ahead of the trainer. Leave it "
                "out (batches are fetched in the background in any case), or, where a collate_fn has much to do, use "
                "tokenloom.integrations.stateful.StatefulLoader(dataset, num_workers=1), which has the trainer's state"
            )
        pins = torch.cuda.is_available() and (self._device is None or self._device.type == "cpu")
        return loader_of(self, **({"pin_memory": pins} | options))

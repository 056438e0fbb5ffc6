"""Datasets whose batches are torch tensors: as what torch takes them, and on which device they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from tokenloom.batch.device import Transfer, resolve
from tokenloom.batch.layout import Batch
from tokenloom.batch.tensors import TensorMaker
from tokenloom.connection.options import ConnectionOptions
from tokenloom.datasets import data_loader
from tokenloom.datasets.connected import ConnectedDataset, RunUrl, SlotOf


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
        data_loader.check(self._device, sys._getframe(1))
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
        data_loader.check_options(options)
        if options.get("num_workers"):
            raise ValueError(
                f"num_workers={options['num_workers']}: a worker would have the state, ahead of the trainer. Leave it "
                "out (batches are fetched in the background in any case), or, where a collate_fn has much to do, use "
                "tokenloom.integrations.stateful.StatefulLoader(dataset, num_workers=1), which has the trainer's state"
            )
        pins = torch.cuda.is_available() and (self._device is None or self._device.type == "cpu")
        return data_loader.loader_of(self, **({"pin_memory": pins} | options))

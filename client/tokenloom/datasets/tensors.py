"""Datasets whose batches are torch tensors: as what torch takes them, and on which device they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

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

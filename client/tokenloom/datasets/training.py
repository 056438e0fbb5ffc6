"""A dataset of tensors that is trained on, and what it gives of the same run to evaluate on and to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tokenloom.datasets.committed import CommittedDataset
from tokenloom.datasets.evaluation import EvaluationDataset
from tokenloom.datasets.peek import PeekDataset
from tokenloom.datasets.tensors import TensorBatches


class TrainingDataset(TensorBatches, CommittedDataset):
    """What ``RemoteDataset`` and ``LocalDataset`` have in common."""

    def evaluation(
        self,
        stream: str = "validation",
        *,
        batch_size: int | None = None,
        samples: int | None = None,
        columns: Iterable[str] | None = None,
        device: str | torch.device | None = None,
    ) -> EvaluationDataset:
        """This run's data to evaluate on, for the same rank, with the same connection and by the same server, also
        where the job has started that: see ``EvaluationDataset``. What is not given is as it is here. Close both."""
        request = self._request
        return EvaluationDataset(
            request.server,
            batch_size or request.batch_size,
            stream=stream,
            samples=samples,
            rank=self.rank,
            world_size=self.world_size,
            columns=request.columns if columns is None else columns,
            device=self._device if device is None else device,
            connection=request.options,
        )

    def peek(
        self,
        at: int | str | Mapping[str, Any] | None = None,
        *,
        columns: Iterable[str] | None = None,
    ) -> PeekDataset:
        """A look at this run's order, by the same server: see ``PeekDataset``. Close both."""
        request = self._request
        return PeekDataset(
            request.server,
            request.batch_size or None,
            at=at,
            columns=request.columns if columns is None else columns,
            connection=request.options,
        )

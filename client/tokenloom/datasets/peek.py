"""``PeekDataset``: a look at a run's order that leaves no trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tokenloom.connection.options import ConnectionOptions, check_count
from tokenloom.connection.topology import ALONE
from tokenloom.datasets.connected import RunUrl
from tokenloom.datasets.order import OrderDataset
from tokenloom.datasets.tensors import TensorBatches


class PeekDataset(TensorBatches, OrderDataset):
    """The batches of a run to look at: it joins nothing, counts nothing and fences nobody, whatever the run is doing.

    ``url`` is as for ``RemoteDataset``. The whole order comes, to this process alone, from ``at`` on: a sample index, a
    ``state_dict()``, ``"latest"`` (what the ledger has committed; the default), ``"fresh"`` (the beginning) or the id
    of a saved snapshot. The order is the run's own, so ``state_dict()`` is a point that training can resume at.

    ``batch_size`` is one number; for a run of buckets it is left out. ``columns``, ``device`` and ``connection`` are
    those of ``RemoteDataset``.
    """

    def __init__(
        self,
        url: RunUrl,
        batch_size: int | None = None,
        *,
        at: int | str | Mapping[str, Any] | None = None,
        columns: Iterable[str] = (),
        device: str | torch.device | None = None,
        connection: ConnectionOptions | None = None,
    ) -> None:
        if batch_size is not None:
            check_count("batch_size", batch_size)
        if at == "":
            raise ValueError(
                'at must be a sample index, a state, "latest", "fresh" or the id of a snapshot; got ""'
            )
        super().__init__(
            url,
            lambda *_, **__: ALONE,
            connection,
            batch_size=batch_size or 0,
            resume=str(at) if isinstance(at, int | str) else "",
            peek=True,
            columns=columns,
            device=device,
        )
        if isinstance(at, Mapping):
            self.load_state_dict(at)

    def _role(self) -> list[str]:
        return []

"""``LocalDataset``: a mixture file's batches in one process, without a server or a socket."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable

import torch
from tokenloom_proto.batch_schedule import Sizes

from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.topology import LaunchOptions, resolve
from tokenloom.datasets.base import TRAIN
from tokenloom.datasets.training import TrainingDataset
from tokenloom.job_server import InProcessServer, mixture_path


class LocalDataset(TrainingDataset):
    """The batches of a mixture file to train on in one process alone: the same samples as a server would give.

    Nothing is kept but the states that the trainer saves, and any server of the run, or another ``LocalDataset``, goes
    on from these. What is wrong with the file is raised here, and what is wrong with the data by the first ``iter()``.
    Needs ``pip install 'tokenloom[server]'``.

    All parameters are those of ``RemoteDataset``; of ``connection`` only ``prefetch_steps`` and ``batch_timeout_s``
    apply, and of ``launch`` only ``fork_from``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int | Sizes | None = None,
        *,
        resume: str | None = None,
        accumulate: int = 1,
        columns: Iterable[str] = (),
        device: str | torch.device | None = None,
        launch: LaunchOptions | None = None,
        connection: ConnectionOptions | None = None,
    ) -> None:
        mixture = mixture_path(path)
        if mixture is None:
            raise ValueError(
                f"a LocalDataset needs no server: give the path of a mixture file (.yaml), not {path!r}"
            )
        (connection or ConnectionOptions()).refuse_credentials(mixture)
        # An attempt of its own: there is no other rank to share one with.
        slot = resolve(
            str(mixture),
            stream=TRAIN,
            timeout_s=0,
            launch=LaunchOptions(attempt=uuid.uuid4().hex),
            single=True,
        )
        if slot.world_size > 1:
            raise ValueError(
                f"a LocalDataset is for one process alone, and this is rank {slot.rank} of {slot.world_size}: use "
                "RemoteDataset with the same mixture file, for which rank 0 starts a server for all ranks"
            )
        super().__init__(
            InProcessServer(mixture),
            lambda *_, **__: slot,
            connection,
            launch=launch or LaunchOptions(),
            batch_size=batch_size,
            resume=resume,
            accumulate=accumulate,
            columns=columns,
            device=device,
        )

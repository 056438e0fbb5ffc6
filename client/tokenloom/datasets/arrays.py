"""``NumpyDataset``: a run's batches as numpy arrays, for who has no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial

from tokenloom_proto.batch_schedule import Sizes

from tokenloom.batch.layout import NumpyBatch
from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.topology import LaunchOptions, resolve
from tokenloom.datasets.order import CommittedDataset


class NumpyDataset(CommittedDataset):
    """The batches of one rank to train on, as numpy arrays: what ``RemoteDataset`` gives, without torch.

    Parameters, samples, states and digests are those of ``RemoteDataset``, and either goes on from a state of the
    other. Ranks are found by the same rules: as given, else those of ``torch.distributed`` where this process uses it,
    else the launcher's (``RANK`` and ``WORLD_SIZE``, or SLURM's). Several ranks that have neither a process group nor a
    SLURM step share an ``attempt`` of ``LaunchOptions``, an id that is new for each launch.

    Arrays are int64 [B, L] or [B], writable, and the holder's alone for as long as anything refers to them. A column of
    rows that numpy has no type for, such as bfloat16, needs ``ml_dtypes``, which JAX brings.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        batch_size: int | Sizes | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        resume: str | None = None,
        accumulate: int = 1,
        columns: Iterable[str] = (),
        launch: LaunchOptions | None = None,
        connection: ConnectionOptions | None = None,
    ) -> None:
        launch = launch or LaunchOptions()
        super().__init__(
            url,
            partial(resolve, rank=rank, world_size=world_size, launch=launch),
            connection,
            launch=launch,
            batch_size=batch_size,
            resume=resume,
            accumulate=accumulate,
            columns=columns,
        )

    def __iter__(self) -> Iterator[NumpyBatch]:
        """Joins the run if that was not done, and goes on after the last batch yielded."""
        return self._batches()

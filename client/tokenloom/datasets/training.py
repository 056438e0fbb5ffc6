"""A dataset of tensors that is trained on, and what it gives of the same run to evaluate on and to look at."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tokenloom.connection.options import ConnectionOptions, check_count
from tokenloom.connection.server import RunServer
from tokenloom.connection.stream import Connection
from tokenloom.connection.topology import ALONE, LaunchOptions, resolve
from tokenloom.datasets.base import TRAIN, RunUrl, batches_of
from tokenloom.datasets.order import CommittedDataset, OrderDataset
from tokenloom.datasets.tensors import TensorBatches
from tokenloom.job_server import mixture_path
from tokenloom.snapshot import Point

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# ``EvaluationDataset``: the same samples at each ``iter()``, on any number of ranks.


log = logging.getLogger("tokenloom")


class EvaluationDataset(TensorBatches):
    """A stream of a run to evaluate on, from its beginning at each ``iter()``.

    ``url``, ranks, ``columns``, ``device`` and ``connection`` are as for ``RemoteDataset``, whose ``evaluation()``
    gives one of the same rank. ``stream`` is ``"validation"`` (what training's sources hold out), or
    ``"validation/ALIAS"`` (what one of them does), or another stream that the mixture file names. Its first ``samples``
    (None: all of it) come, cut over the ranks: the last micro-step is filled up with padding samples (source −1, labels
    −100), so that every rank does as many micro-steps, and ``len()`` tells how many.

    Evaluating joins no generation and counts nothing, so it may happen before, while and after the run trains. It has
    no state.
    """

    def __init__(
        self,
        url: RunUrl,
        batch_size: int | None = None,
        *,
        stream: str = "validation",
        samples: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: ProcessGroup | None = None,
        columns: Iterable[str] = (),
        device: str | torch.device | None = None,
        connection: ConnectionOptions | None = None,
    ) -> None:
        if not stream or stream == TRAIN:
            raise ValueError(
                f"stream={stream!r} is trained on: use RemoteDataset, or PeekDataset to look at it"
            )
        if not batch_size:
            raise ValueError(
                f"stream={stream!r}: batch_size is missing; give the samples of a rank and micro-step"
            )
        check_count("batch_size", batch_size)
        if samples is not None:
            check_count("samples", samples)
        # Who evaluates takes no slot, so there is no id to share, and nobody to wait for; but for a server that
        # rank 0 starts.
        starts_server = not isinstance(url, RunServer) and mixture_path(url) is not None
        attempt = None if starts_server else stream
        super().__init__(
            url,
            partial(
                resolve,
                rank=rank,
                world_size=world_size,
                launch=LaunchOptions(attempt=attempt, process_group=process_group),
            ),
            connection,
            stream=stream,
            batch_size=batch_size,
            samples=samples or 0,
            columns=columns,
            device=device,
        )
        #: Known once the server said how many samples there are.
        self._steps: int | None = None

    def _batches(self) -> Iterator[Any]:
        """The first samples of the stream, each time."""
        self._check_process()
        self._check_not_closed()
        if self._closer is not None:
            self._closer()
        connection = self._connect(self._request)
        self._learn_length(connection)
        self._keep(connection)

        def next_batch() -> dict[str, Any]:
            self._check_not_closed()
            if connection is not self._connection:
                raise RuntimeError(
                    "another iter() of this EvaluationDataset has begun, which ended this iterator: for two at a time "
                    "make two datasets"
                )
            taken = connection.take()
            if taken is None:
                raise StopIteration
            return taken[0]

        return batches_of(next_batch)

    def __len__(self) -> int:
        """Micro-steps of an evaluation. Asks the server if none was there, and waits until the samples are made."""
        if self._steps is None:
            with closing(self._connect(self._request)) as connection:
                return self._learn_length(connection)
        return self._steps

    def _learn_length(self, connection: Connection) -> int:
        samples = connection.opening.samples
        if self._steps is None and samples < (self._request.samples or 0) and self.rank == 0:
            log.warning(
                "%s: stream %s has %d samples, not %d: these are evaluated on",
                self._request.address, self.stream, samples, self._request.samples,
            )  # fmt: skip
        self._steps = -(-samples // (self.world_size * connection.opening.layout.batch_size))
        return self._steps

    @property
    def _position(self) -> Point:
        _ = self.facts  # joined
        assert self._connection is not None
        return self._connection.buffer.consumed

    def _role(self) -> list[str]:
        return [f"stream={self.stream!r}", *super()._role()]

    def _describe(self) -> str:
        return f"{'so far unknown' if self._steps is None else self._steps} micro-steps"


# ``PeekDataset``: a look at a run's order that leaves no trace.


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


# Whether a dataset was made for the processes and the steps that its framework has.


def check_processes(dataset: TrainingDataset, processes: int, runs: str, after: str) -> None:
    """Raises ``ValueError`` for another number of ranks. ``runs``: who has so many processes; ``after``: what starts
    the process group."""
    if dataset.world_size != processes:
        raise ValueError(
            f"the dataset is rank {dataset.rank} of {dataset.world_size}, but {runs} {processes} processes: make the "
            f"RemoteDataset after {after}, which starts the process group, and without rank and world_size"
        )


def check_accumulate(dataset: TrainingDataset, accumulate: int, has: str) -> None:
    """Raises ``ValueError`` for batches that count the labels of other steps than the framework makes. ``has``: its
    option for how many batches a step has."""
    if dataset.accumulate not in (1, accumulate):
        raise ValueError(
            f"the dataset has accumulate={dataset.accumulate}, but {has}={accumulate}, so global_label_tokens would be "
            "of other steps: make them equal, or leave accumulate out"
        )

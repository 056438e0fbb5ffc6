"""The datasets of tensors: those that are trained on, remote and local, and what they give of the same run to evaluate
on and to look at."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tokenloom_proto.batch_schedule import Sizes

from tokenloom.connection.options import ConnectionOptions, check_count
from tokenloom.connection.server import RunServer
from tokenloom.connection.stream import Connection
from tokenloom.connection.topology import ALONE, LaunchOptions, resolve
from tokenloom.datasets.base import TRAIN, RunUrl, batches_of
from tokenloom.datasets.order import CommittedDataset, OrderDataset
from tokenloom.datasets.tensors import TensorBatches
from tokenloom.job_server import InProcessServer, mixture_path
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


class RemoteDataset(TrainingDataset):
    """The batches of one rank to train on, streamed from a Tokenloom server.

    The first ``iter()`` joins the run: at the state that ``load_state_dict()`` was called with, else at ``resume``. A
    second one goes on after the last batch yielded; to go back, make a new dataset. At the end of the data iteration
    stops, and ``end_reason`` says why.

    Rank and world size are fixed here: as given, else those of ``torch.distributed`` where this process uses it, else
    the launcher's (``RANK`` and ``WORLD_SIZE``, or SLURM's).

    It may be handed to a process that is spawned, such as a DataLoader's worker. With one rank that is so even after it
    has joined: the copy goes on where this one stands, as a new attempt, and this one is fenced.

    Args:
        url: ``grpc://host:port/run``; with a standby ``grpc://a:50051,b:50051/run``: whichever leads is found. REST's
            address, or a page's URL, is asked for gRPC's here (see ``docs/running.md``). Or the path of a mixture file
            (``.yaml``): rank 0 then starts the server, which all ranks of the launch join, and ends it when they have
            closed their datasets or it dies. What is wrong with the file is raised here, on every rank. That needs
            ``pip install 'tokenloom[server]'``. For one process alone, without a server: ``LocalDataset``.
        batch_size: Samples per rank and micro-step; for a run of buckets, whose mixture file says it, it is left out.
            It may follow the run's tokens: ``[(0, 4), (1_000_000, 8)]`` are pairs of total tokens, ascending from 0,
            and samples, each from the first optimiser step on that begins at so many tokens or later.
        rank: This process's data-parallel rank, with ``world_size``; both or neither.
        world_size: How many ranks there are.
        resume: Where to begin if no state is loaded: ``"latest"`` (what the ledger has committed), ``"fresh"`` (the
            beginning) or the id of a saved snapshot.
        accumulate: How many micro-steps of ``next()`` an optimiser step has, counted from where this launch joined; the
            same on all ranks. The batch size only changes between two optimiser steps. ``global_label_tokens`` is of
            all batches of one, so ``next()`` waits until they are all there or the data end; at least twice as many are
            fetched ahead.
        columns: What batches have beside ids and labels: ``position_ids``, ``document_ids``, ``attention_mask``,
            ``loss_mask`` and ``cu_seqlens`` (which brings ``max_seqlen``).
        device: Where the tensors are made, such as ``"cuda"``, equal to the bit: ids cross to it as narrow as they
            travelled, from pinned memory and one batch ahead, and are widened there. A batch is ready for the stream
            that is current at ``next()``.
        launch: What only some launches say: a process group or an attempt id, a takeover, a fork.
        connection: The token, TLS, timeouts, and how many batches are fetched ahead.
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
        device: str | torch.device | None = None,
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
            device=device,
        )


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

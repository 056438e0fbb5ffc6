"""``RemoteDataset``: a run's batches as a torch dataset that can be saved and resumed to the sample."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

import torch
from tokenloom_proto.batch_schedule import Sizes

from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.topology import LaunchOptions, resolve
from tokenloom.datasets.training import TrainingDataset


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

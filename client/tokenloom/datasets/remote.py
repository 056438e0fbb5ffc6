"""``RemoteDataset``: a run's batches as a torch dataset that can be saved and resumed to the sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from tokenloom_proto.batch_schedule import Sizes

from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.topology import resolve
from tokenloom.datasets.training import TrainingDataset

if TYPE_CHECKING:  # a build of torch may lack it
    from torch.distributed import ProcessGroup


class RemoteDataset(TrainingDataset):
    """The batches of one rank to train on, streamed from a Tokenloom server.

    ``url`` is ``grpc://host:port/run``; with a standby ``grpc://a:50051,b:50051/run``: whichever leads is found.
    REST's address, or a page's URL, is asked for gRPC's here (see ``docs/running.md``). Or it is the path of a mixture
    file (``.yaml``): rank 0 then starts the server, which all ranks of the launch join, and ends it when they have
    closed their datasets or it dies. What is wrong with the file is raised here, on every rank. That needs
    ``pip install 'tokenloom[server]'``. For one process alone, without a server: ``LocalDataset``.

    Rank and world size are fixed here: as given, else those of ``process_group`` (or of the default group), else the
    launcher's. All ranks of one launch share an ``attempt`` id, by the process group's store, the SLURM job step, or as
    given.

    ``batch_size`` is samples per rank and micro-step; for a run of buckets, whose mixture file says it, it is left out.
    It may follow the run's tokens: ``[(0, 4), (1_000_000, 8)]`` are pairs of total tokens, ascending from 0, and
    samples, each from the first optimiser step on that begins at so many tokens or later.

    The first ``iter()`` joins the run: at the state that ``load_state_dict()`` was called with, else at ``resume``,
    which is ``"latest"`` (what the ledger has committed), ``"fresh"`` (the beginning) or the id of a saved snapshot.
    ``fork_from`` is another run's ``state_dict()``: this run, which must not have begun, begins there, under its own
    mixture. A state that is loaded comes first, so a script that is restarted from its checkpoint may leave it there.

    A run that another attempt trains on is refused with ``RunBusy`` as long as every rank of that is alive;
    ``takeover=True`` ends it on purpose.

    ``accumulate`` is how many micro-steps of ``next()`` an optimiser step has, counted from where this launch joined;
    the same on all ranks. The batch size only changes between two optimiser steps. ``global_label_tokens`` is of all
    batches of one, so ``next()`` waits until they are all there or the data end; at least twice as many are fetched
    ahead.

    ``columns`` names what batches have beside ids and labels: ``position_ids``, ``document_ids``, ``attention_mask``,
    ``loss_mask`` and ``cu_seqlens`` (which brings ``max_seqlen``).

    ``device="cuda"`` makes the tensors there, equal to the bit: ids cross to it as narrow as they travelled, from
    pinned memory and one batch ahead, and are widened there. A batch is ready for the stream that is current at
    ``next()``.

    A second ``iter()`` goes on after the last batch yielded. To go back, make a new dataset. At the end of the data
    iteration stops; with ``at_end="raise"`` it raises ``EndOfData``, which says why they ended.

    ``connection`` has the token, TLS, timeouts, and how many batches are fetched ahead.

    It may be handed to a process that is spawned, such as a DataLoader's worker. With one rank that is so even after it
    has joined: the copy goes on where this one stands, as a new attempt, and this one is fenced.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        batch_size: int | Sizes | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: ProcessGroup | None = None,
        resume: str | None = None,
        fork_from: Mapping[str, Any] | None = None,
        takeover: bool = False,
        accumulate: int = 1,
        columns: Iterable[str] = (),
        device: str | torch.device | None = None,
        at_end: Literal["stop", "raise"] = "stop",
        attempt: str | None = None,
        connection: ConnectionOptions | None = None,
    ) -> None:
        super().__init__(
            url,
            partial(
                resolve,
                rank=rank,
                world_size=world_size,
                attempt=attempt,
                process_group=process_group,
            ),
            connection,
            batch_size=batch_size,
            resume=resume,
            fork_from=fork_from,
            takeover=takeover,
            accumulate=accumulate,
            columns=columns,
            device=device,
            at_end=at_end,
        )

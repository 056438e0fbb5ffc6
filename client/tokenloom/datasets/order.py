"""A dataset of the run's order, from a state on: what training and peeking have in common."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any

from tokenloom_proto.batch_schedule import BatchSchedule, Sizes

from tokenloom.connection.join import Request
from tokenloom.connection.options import ConnectionOptions, check_count
from tokenloom.connection.topology import LaunchOptions
from tokenloom.datasets.base import ConnectedDataset, ResumableDataset, RunUrl, SlotOf, batches_of
from tokenloom.errors import ProtocolError
from tokenloom.snapshot import History, Loaded

log = logging.getLogger("tokenloom")
#: What there is to say of a length.
NO_LENGTH = (
    "a dataset that is trained on has no len(): the mixture says how long it goes on, and who believed a number "
    "would stop there. No sampler is needed, since the server shuffles, and gives each rank its part of every step; "
    "trainers take a number of steps (max_steps), and plan() and TokenBudget tell what the data are enough for"
)
_BEGUN_AGAIN = "run %s: begun again at sample %d (resume='fresh', no state loaded): what was given before comes again"


class OrderDataset(ConnectedDataset, ResumableDataset):
    """The batches of a run, one after the other. The first ``iter()`` joins; a second one goes on."""

    def __init__(
        self,
        url: RunUrl,
        slot_of: SlotOf,
        connection: ConnectionOptions | None,
        *,
        fork_from: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """``fork_from``: the state of another run that this one begins at, where none is loaded; the rest as for
        ``ConnectedDataset``."""
        self._fork = Loaded.read(fork_from) if fork_from is not None else None
        super().__init__(url, slot_of, connection, **fields)
        self._start = Loaded.start(self.run, self.stream)

    def _batches(self) -> Iterator[Any]:
        """Joins the run if that was not done, and goes on after the last batch yielded."""
        self._check_process()
        if self._connection is None:
            self._check_not_closed()
            self._join()
        if self._request.counted and not self.rank:
            self.history.begin()
        return batches_of(self._next)

    def __len__(self) -> int:
        raise TypeError(NO_LENGTH)

    def _next(self) -> dict[str, Any]:
        self._check_process()
        self._check_not_closed()
        assert self._connection is not None and self._history is not None, (
            "the iterator was made by a Join"
        )
        taken = self._connection.take()
        if taken is None:
            self._history.finish()
            raise StopIteration
        batch, point = taken
        self._history.append(point)
        return batch

    def _join(self) -> None:
        fork = self._fork if self._loaded is None else None
        loaded = self._loaded or fork
        request = self._request
        if loaded is not None:
            request = replace(request, resume="", state=loaded.text, fork=fork is not None)
        connection = self._connect(request)
        start, skips = connection.opening.start, connection.opening.skips
        if loaded is not None and not loaded.leads_to(start):
            connection.close()
            raise ProtocolError(
                f"the loaded state stands at sample index {loaded.sample_index} (digest {loaded.digest}), "
                f"but the server starts at {start.sample_index} (digest {start.digest})"
            )
        for line in skips if self.rank == 0 else ():
            log.warning("run %s: %s", self.run, line)
        if request.resume == "fresh" and connection.opening.facts.generation > 1 and self.rank == 0:
            log.warning(_BEGUN_AGAIN, self.run, start.sample_index)
        self._keep(connection)
        self._joined_in.value = os.getpid()
        # The loaded state may not know of samples that are passed over here: the server's does.
        # And a state of the run that was forked is none of this one, nor is an older data loader's.
        own = self._loaded if isinstance(self._loaded, Loaded) and not skips and not fork else None
        self._history = History(connection.opening.template, start, own)

    def _describe(self) -> str:
        if self._history is None:
            if self._closed:
                return "closed before it joined"
            if self._joined_elsewhere():
                return f"joined in process {self._joined_in.value}"
            if isinstance(self._loaded, Loaded):
                return f"not joined yet, to go on at sample index {self._loaded.sample_index}"
            return "not joined yet"
        point, ended = self._history.last, self.end_reason
        position = f"generation {self.generation} at sample index {point.sample_index}, {point.total_tokens} tokens"
        if ended is not None and self._connection is not None and self._connection.buffer.drained:
            return f"{position}, at the end of the data: {ended}"
        return position + (", closed" if self._closed else "")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._connection is None:
            return state
        if get_spawning_popen() is None:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be copied once it has joined the run: both would take the same "
                "batches; make a new one"
            )
        reasons = {
            "it is closed": self._closed,
            "its other ranks would be left where they are": self.world_size > 1,
            "the server is in this one": self._request.server.in_job,
        }
        if any(reasons.values()):
            reason = next(reason for reason, holds in reasons.items() if holds)
            raise RuntimeError(
                f"this {type(self).__name__} joined the run and cannot be handed to another process, since {reason}: "
                "hand it over before the first iter(), use num_workers=0 (batches are fetched in the background all "
                "the same), or make a new one"
            )
        # The other process goes on from here.
        loaded = Loaded.read(self.state_dict())
        return state | {"_history": None, "_loaded": loaded, "_request": self._request_of_copy()}

    def _request_of_copy(self) -> Request:
        """What the process asks for that goes on where this one stands."""
        return self._request


# A dataset that is trained on: its progress is committed, and its rank reports losses.


class CommittedDataset(OrderDataset):
    """A dataset to train on, whatever its batches are made of."""

    def __init__(
        self,
        url: RunUrl,
        slot_of: SlotOf,
        connection: ConnectionOptions | None,
        *,
        launch: LaunchOptions,
        batch_size: int | Sizes | None,
        resume: str | None,
        accumulate: int,
        **fields: Any,
    ) -> None:
        """``fields``: further fields of ``Request``."""
        check_count("accumulate", accumulate)
        prefetched = connection.prefetch_steps if connection else None
        if prefetched is not None and prefetched < accumulate:
            raise ValueError(
                f"prefetch_steps is {prefetched}; expected at least accumulate, {accumulate}: all micro-steps of an "
                "optimiser step are fetched before the first is handed out"
            )
        if resume is not None and not resume:
            raise ValueError(
                'resume must be "latest", "fresh" or the id of a snapshot; got an empty text'
            )
        if launch.fork_from is not None and resume:
            raise ValueError(
                f"fork_from begins a new run, and resume={resume!r} goes on with one: give one of them"
            )
        if isinstance(batch_size, int):
            check_count("batch_size", batch_size)
            fields["batch_size"] = batch_size
        elif batch_size is not None:
            fields["batch_sizes"] = BatchSchedule.read(batch_size, accumulate).sizes
        fields |= {"resume": resume or "", "accumulate": accumulate, "takeover": launch.takeover}
        super().__init__(url, slot_of, connection, fork_from=launch.fork_from, **fields)

    @property
    def accumulate(self) -> int:
        """Micro-steps of ``next()`` for each of the optimiser's."""
        return self._request.accumulate

    def report(  # type: ignore[override]
        self,
        losses: Mapping[int, tuple[float, int]],
        *,
        sample_index: int,
        total_tokens: int,
        step: int,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Sends losses over all ranks to the server, which shows them: by source id the mean and the tokens it is of.

        For one rank of the run to call, with a rising ``sample_index``; ``SourceLoss`` does. Returns at once: it is
        sent in the background, and what cannot be sent is logged and dropped.
        """
        _ = self.facts  # joined
        assert self._connection is not None
        self._connection.report(
            losses,
            sample_index=sample_index,
            total_tokens=total_tokens,
            step=step,
            loss=loss,
            learning_rate=learning_rate,
        )

    def _request_of_copy(self) -> Request:
        # An attempt of its own, which fences this one.
        slot = replace(self._request.topology, attempt=uuid.uuid4().hex)
        return replace(self._request, topology=slot, takeover=True)

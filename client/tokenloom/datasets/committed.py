"""A dataset that is trained on: its progress is committed, and its rank reports losses."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenloom_proto.batch_schedule import BatchSchedule, Sizes

from tokenloom.connection.join import Request
from tokenloom.connection.options import ConnectionOptions, check_count
from tokenloom.connection.topology import LaunchOptions
from tokenloom.datasets.connected import RunUrl, SlotOf
from tokenloom.datasets.order import OrderDataset


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

"""A data loader for torchtitan's trainer: its ``BaseDataLoader`` in all but the base class, which needs no torchtitan.

torchtitan makes a loader on every process, tells it its data-parallel rank only, takes pairs of inputs and labels from
it, and gives it to its checkpointer, which asks for ``state_dict()`` after a step and writes it in the background.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.batch.layout import Batch
from tokenloom.datasets.base import TRAIN
from tokenloom.datasets.training import EvaluationDataset
from tokenloom.integrations.mesh import GroupDataset, peers_of


@dataclass(kw_only=True, slots=True)
class TokenloomConfig:
    """What a job's config says of the loader; the base of its ``Config``."""

    url: str
    """``grpc://host:port/run``"""

    positions: bool = True
    """Give ``positions`` beside ``input``: counted from 0 in each document. Without, for models that take none."""

    stream: str = TRAIN
    """What to read: ``train``, or a stream to evaluate on, such as ``validation``."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``RemoteDataset``, such as ``{"accumulate": 2}``; of ``EvaluationDataset`` where a stream
    is evaluated on, such as ``{"samples": 2048}``."""


class TokenloomDataLoader:
    """A data-parallel rank's batches as ``({"input": ids, "positions": …}, labels)``, int64, on each of its processes.

    Made with ``max_context_length`` and ``num_tokens_per_batch``, as torchtitan does since August 2026, all of a batch
    lies in one row: [num_tokens_per_batch]. Made with ``seq_len`` and ``local_batch_size``, as before that, tensors are
    [B, L].

    The mixture file says ``labels: shifted``: torchtitan compares the logits at a place with the label there. Its
    ``sequence_length`` is the job's context length.

    ``state_dict()`` is equal on all processes and has one key, so a checkpoint holds it once, whatever the number of
    data-parallel ranks, and any other number goes on from it.

    To be made by all processes of the job at the same time. Raises ``ValueError`` for sizes that do not fit.
    """

    def __init__(
        self,
        config: TokenloomConfig,
        *,
        dp_world_size: int,
        dp_rank: int,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        **_: Any,
    ) -> None:
        self._flat = num_tokens_per_batch is not None
        if max_context_length is not None and num_tokens_per_batch is not None:
            self._length = max_context_length
            size, rest = divmod(num_tokens_per_batch, max_context_length)
            if rest or not size:
                raise ValueError(
                    f"num_tokens_per_batch={num_tokens_per_batch} must be a multiple of "
                    f"max_context_length={max_context_length}, as each sample of the run has so many tokens"
                )
        elif seq_len is not None and local_batch_size is not None:
            self._length, size = seq_len, local_batch_size
        else:
            raise ValueError(
                "give max_context_length and num_tokens_per_batch, or seq_len and local_batch_size"
            )
        self._config = config
        #: Where the batches come from: ``sample_index``, ``total_tokens``, ``digest``, …
        self.dataset: GroupDataset | EvaluationDataset
        options = dict(config.options)
        if config.positions:
            options["columns"] = {*options.get("columns", ()), "position_ids"}
        if config.stream != TRAIN:
            # Who evaluates takes no slot of the run, so each process may have a stream of its own.
            self.dataset = EvaluationDataset(
                config.url,
                size,
                stream=config.stream,
                rank=dp_rank,
                world_size=dp_world_size,
                **options,
            )
            return
        one_each = not dist.is_initialized() or dp_world_size == dist.get_world_size()
        self.dataset = GroupDataset(
            config.url,
            size,
            rank=dp_rank,
            world_size=dp_world_size,
            peers=[dist.get_rank() if dist.is_initialized() else 0]
            if one_each
            else peers_of(dp_rank),
            **options,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Joins the run if that was not done, and goes on after the last batch yielded."""
        batches = iter(self.dataset)
        if self.dataset.labels != "shifted":
            raise ValueError(
                f"{self._config.url} gives labels that equal the ids, and torchtitan compares the logits at a place "
                "with the label there: say `labels: shifted` in the mixture file"
            )
        if self.dataset.sequence_length != self._length:
            raise ValueError(
                f"{self._config.url} gives samples of {self.dataset.sequence_length} tokens (sequence_length), and the "
                f"job's context length is {self._length}: they must be equal"
            )
        return map(self._pair, batches)

    def _pair(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = {"input": batch["input_ids"]}
        if self._config.positions:
            inputs["positions"] = batch["position_ids"]
        if self._flat:
            return {name: column.flatten() for name, column in inputs.items()}, batch[
                "labels"
            ].flatten()
        return inputs, batch["labels"]

    def state_dict(self) -> dict[str, str]:
        """The state after the last batch yielded; before the first one, too, as the checkpointer asks then. Empty of a
        stream that is evaluated on, which begins anew each time."""
        return self.dataset.state_dict() if isinstance(self.dataset, GroupDataset) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps a state for the first ``iter()``. Raises ``SnapshotInvalid``, also for the state of another loader."""
        if isinstance(self.dataset, GroupDataset):
            self.dataset.load_state_dict(state)

    def close(self) -> None:
        """Ends the stream."""
        self.dataset.close()

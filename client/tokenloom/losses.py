"""Losses of single tokens, and their means by source over all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional

from tokenloom.batch.layout import IGNORED, PADDING
from tokenloom.datasets.base import BatchDataset

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HasRanks(Protocol):
    """A dataset, or what else knows the number of data-parallel ranks, such as Lightning's Trainer."""

    @property
    def world_size(self) -> int:
        """That number."""


def mean_loss(losses: torch.Tensor, batch: Mapping[str, Any], dataset: HasRanks) -> torch.Tensor:
    """This rank's part of the mean loss over all labels that count in the optimiser step, over all ranks; for
    ``backward()``.

    ``losses`` are those of single tokens, 0 where the label is −100, such as ``token_losses()`` gives. They are summed,
    divided by ``global_label_tokens`` and multiplied by the number of ranks, over which DDP and FSDP average. So every
    label weighs the same, however labels are spread, and a rank whose batch is nothing but padding has the loss 0,
    where a mean of its own would be no number. With ``accumulate`` the parts of all micro-steps add up to the mean.

    For the mean over several batches, as in an evaluation: ``SourceLoss``. Raises ``ValueError`` for losses of whole
    samples, and for a batch whose labels the server has not counted.
    """
    count: int = batch["global_label_tokens"]
    if losses.dim() != 2 or (
        not count and ("labels" not in batch or bool((batch["labels"][:, 1:] != IGNORED).any()))
    ):
        raise ValueError(
            f"losses have the shape {list(losses.shape)}, and the batch has global_label_tokens={count}: expected a "
            "loss for each token, [B, L] or [B, L - 1], and labels that the server counts, which it does not for rows "
            "from buckets: take the mean of their losses yourself"
        )
    return losses.sum() * (dataset.world_size / max(1, count))


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, *, shifted: bool, chunk_tokens: int = 1024
) -> torch.Tensor:
    """Cross entropy of each token, float32; 0 where the label is −100.

    ``logits`` are [B, L, V] of any float dtype, ``labels`` [B, L]. With ``shifted`` they are the ids one further
    (``labels: shifted`` in the mixture file), and the result is [B, L]. Without, they are the input ids themselves,
    each predicted by the logits before it, as a model does that shifts inside; the result is [B, L − 1]. A run's own
    way is ``dataset.labels == "shifted"``.

    Logits are widened to float32 ``chunk_tokens`` at a time: under ``torch.no_grad()`` that is all that a large
    vocabulary takes beside the logits. Logits that are sharded over the vocabulary need their own cross entropy.
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)}: expected [B, L, V] and "
            "[B, L]"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; expected at least 1")
    if not shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    samples, length = labels.shape
    rows = max(1, chunk_tokens // max(1, length))
    rows_of_losses = []
    for top in range(0, samples, rows):
        parts = []
        for left in range(0, length, chunk_tokens):
            here = slice(top, top + rows), slice(left, left + chunk_tokens)
            wanted = labels[here]
            losses = functional.cross_entropy(
                logits[here].float().flatten(0, 1),
                wanted.flatten(),
                ignore_index=IGNORED,
                reduction="none",
            )
            parts.append(losses.view(wanted.shape))
        rows_of_losses.append(torch.cat(parts, dim=1))
    return torch.cat(rows_of_losses)


# ``SourceLoss``: the mean loss of each source over all ranks, for logs, for the server's page, and for policies.


log = logging.getLogger("tokenloom")

#: Room for sources that revisions bring between two reductions, beside as many again as there are.
_SPARE = 64


@dataclass(frozen=True, slots=True)
class MeanLosses:
    """Of the steps between two reductions, over all ranks; equal on each."""

    losses: dict[str, float]
    """By alias: the mean over the tokens that count. A source that had none is not there."""
    tokens: dict[str, int]
    """By alias: those tokens; samples, where a batch has no labels and losses are per sample."""
    loss: float | None
    """The mean over all of them; None where there was none."""
    sample_index: int
    """End of the last batch that was added."""
    total_tokens: int
    """Of the run there."""
    by_id: dict[int, tuple[float, int]]
    """By source id: mean and tokens."""


class SourceLoss:
    """Sums losses by source on the device they are on, without waiting for it, and reduces them over ranks when asked.

    ::

        source_loss = SourceLoss(dataset)
        for step, batch in enumerate(dataset, start=1):
            logits = model(batch["input_ids"])
            losses = token_losses(logits, batch["labels"], shifted=dataset.labels == "shifted")
            source_loss.add(losses, batch)
            ...
            if step % 50 == 0:  # on every rank: it is a collective
                print(source_loss.log(step=step).losses)

    ``process_group`` is the data-parallel one, whose processes have a dataset; the default group if not given. On one
    rank there is no collective. Nothing of it is in a checkpoint: what was added since the last reduction goes with the
    process.
    """

    def __init__(self, dataset: BatchDataset, process_group: ProcessGroup | None = None) -> None:
        self._dataset = dataset
        self._group = process_group
        # [2, sources + 1]: loss and tokens; in the last column those of sources for which there is no room yet.
        self._sums: torch.Tensor | None = None
        self._room = 0
        self._batches = 0
        self._place = (0, 0)
        self._warned = False

    def add(self, losses: torch.Tensor, batch: Mapping[str, Any]) -> None:
        """Adds a batch's losses: one for each sample, [B], or for each token, [B, L]; or [B, L − 1], where a model
        shifts labels inside: the first id of a sample is predicted by none.

        Tokens whose label is −100 and padding samples do not count. A sample's own loss is the mean over its tokens,
        and weighs as many. Raises ``ValueError`` for another shape.
        """
        with torch.no_grad():
            losses, source_ids = losses.detach(), batch["source_ids"]
            if losses.dim() not in (1, 2) or len(losses) != len(source_ids):
                raise ValueError(
                    f"losses have the shape {list(losses.shape)}, but the batch has {len(source_ids)} samples: "
                    "expected [B], [B, L] or [B, L - 1], such as of token_losses() or of a loss with reduction='none'"
                )
            source_ids = source_ids.to(losses.device, non_blocking=True)
            sums = self._sums_on(losses.device)
            total, tokens = self._by_sample(losses, batch.get("labels"), sums.dtype)
            padding = source_ids == PADDING
            added = torch.stack([total, tokens]).masked_fill_(padding, 0)
            sums.index_add_(1, source_ids.clamp(0, self._room), added)
        self._batches += 1
        if "sample_index" in batch and "total_tokens" in batch:
            self._place = batch["sample_index"], batch["total_tokens"]
        else:  # what is left of a batch that a framework took apart
            self._place = self._dataset.sample_index, self._dataset.total_tokens

    def reduce(self) -> MeanLosses:
        """The mean losses since the last call, over all ranks: one all-reduce, which every rank has to take part in,
        and the one time that the device is waited for. Starts anew."""
        sums = self._sums
        if sums is None:
            raise RuntimeError("no loss was added yet: call add() with each batch's losses first")
        self._sum_over_ranks(sums)
        total, tokens = sums.tolist()
        by_id = {source: (total[source] / n, round(n)) for source, n in enumerate(tokens[:-1]) if n}
        known = {source.id: source.alias for source in self._dataset.sources}
        named: dict[str, int] = {}
        for source in by_id:
            alias = known.get(source, f"source {source}")
            named[alias if alias not in named else f"{alias} ({source})"] = source
        count = sum(tokens)
        means = MeanLosses(
            losses={name: by_id[source][0] for name, source in named.items()},
            tokens={name: by_id[source][1] for name, source in named.items()},
            loss=sum(total) / count if count else None,
            sample_index=self._place[0],
            total_tokens=self._place[1],
            by_id=by_id,
        )
        if tokens[-1]:
            log.warning(
                "%d tokens are of sources that came since the last reduction, more than %d at once; their losses are "
                "only in the mean over all",
                round(tokens[-1]), self._room,
            )  # fmt: skip
        # From what all ranks have alike: the tensors that they reduce must have one size.
        if tokens[-1] or 2 * max(by_id, default=0) >= self._room:
            self._sums, self._room = None, 2 * self._room
        else:
            sums.zero_()
        return means

    def report(
        self, means: MeanLosses, *, step: int | None = None, learning_rate: float | None = None
    ) -> None:
        """Shows what was reduced at the server: in its figures, metrics and page. Rank 0 sends it, in the background; a
        server that cannot be reached neither delays nor ends the training.

        ``step`` is the trainer's own count, for people; the batches that were added if not given. Losses that are not
        finite are left out.
        """
        if self._dataset.rank:
            return
        finite = {source: each for source, each in means.by_id.items() if math.isfinite(each[0])}
        if len(finite) < len(means.by_id) and not self._warned:
            self._warned = True
            named = ", ".join(
                name for name, loss in means.losses.items() if not math.isfinite(loss)
            )
            log.warning(
                "the loss of %s is not finite at sample %d, and is not reported",
                named,
                means.sample_index,
            )
        self._dataset.report(
            finite,
            sample_index=means.sample_index,
            total_tokens=means.total_tokens,
            step=self._batches if step is None else step,
            loss=means.loss if means.loss is not None and math.isfinite(means.loss) else None,
            learning_rate=learning_rate,
        )

    def log(self, *, step: int | None = None, learning_rate: float | None = None) -> MeanLosses:
        """``reduce()``, and ``report()`` of it."""
        means = self.reduce()
        self.report(means, step=step, learning_rate=learning_rate)
        return means

    def _sums_on(self, device: torch.device) -> torch.Tensor:
        if self._sums is None:
            self._room = self._room or 2 * len(self._dataset.sources) + _SPARE
            # Sums of many small numbers; only Apple's devices have no float64.
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._sums = torch.zeros(2, self._room + 1, dtype=dtype, device=device)
        elif self._sums.device != device:
            raise ValueError(
                f"losses came on {self._sums.device} before, and now on {device}: keep them on one device"
            )
        return self._sums

    def _by_sample(
        self, losses: torch.Tensor, labels: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each sample's sum of losses, and the tokens in it."""
        if labels is not None and labels.dim() == 2:
            labels = labels.to(losses.device, non_blocking=True)
            width = (
                losses.shape[1]
                if losses.dim() == 2
                else labels.shape[1] - (self._dataset.labels == "same")
            )
            first = labels.shape[1] - width
            if first not in (0, 1):
                raise ValueError(
                    f"losses have the shape {list(losses.shape)} and labels {list(labels.shape)}: expected [B, L] "
                    "losses, or [B, L - 1] where the model shifts labels inside"
                )
            counted = labels[:, first:] != IGNORED
        else:
            counted = torch.ones_like(losses, dtype=torch.bool).view(len(losses), -1)
        tokens = counted.sum(1).to(dtype)
        if losses.dim() == 1:
            # What a model gives for a sample without tokens is mostly no number.
            return torch.where(tokens > 0, losses.to(dtype) * tokens, 0), tokens
        return torch.where(counted, losses, 0).sum(1, dtype=dtype), tokens

    def _sum_over_ranks(self, sums: torch.Tensor) -> None:
        ranks = self._dataset.world_size
        if ranks == 1 and self._group is None:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"this dataset is one of {ranks} ranks, and losses are summed over them by torch.distributed, which is "
                "not initialised: call torch.distributed.init_process_group"
            )
        size = dist.get_world_size(self._group)
        if size < 1 or size % ranks:
            raise ValueError(
                f"the process group has {size} processes, but the dataset {ranks} ranks: give SourceLoss the "
                "data-parallel group as process_group"
            )
        if size > 1:
            dist.all_reduce(sums, group=self._group)

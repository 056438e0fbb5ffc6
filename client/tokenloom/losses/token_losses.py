"""From logits and labels to a loss for each token, and to the mean that a training step takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional

from tokenloom.batch.layout import IGNORED


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

"""What a loss is divided by: labels of a whole optimiser step, over all ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fake_server import Script, ahead, eventually, serving
from tokenloom import Batch, LaunchOptions, RemoteDataset, SourceError, mean_loss, token_losses
from torch.nn.functional import cross_entropy

VOCABULARY, BATCH = 258, 2
#: With the label that ``cross_entropy`` leaves out.
IGNORED = -100


def ranks_of(url: str, world_size: int, **fields: Any) -> list[list[Batch]]:
    """What each rank gets, from the run's beginning to its end."""
    found: list[list[Batch]] = [[] for _ in range(world_size)]
    attempt = f"{world_size}-{fields}"

    def read(rank: int) -> None:
        given = {
            "rank": rank,
            "world_size": world_size,
            "launch": LaunchOptions(attempt=attempt, takeover=True),
            "resume": "fresh",
        }
        with RemoteDataset(url, BATCH, **given, **fields) as dataset:
            # Memory is used again; these are kept.
            found[rank] = [{**batch, "labels": batch["labels"].clone()} for batch in dataset]  # type: ignore[misc]

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return found


def loss_of(
    model: torch.Tensor, batch: Batch, shifted: bool, reduction: str = "sum"
) -> torch.Tensor:
    """The loss of a model that knows nothing but the id before, as causal models take it."""
    logits, labels = model[batch["input_ids"]], batch["labels"]
    if not shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(
        logits.reshape(-1, VOCABULARY),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction=reduction,
    )


@pytest.mark.parametrize("labels", ["same", "shifted"])
def test_losses_of_all_ranks_and_steps_over_the_labels_are_the_mean_of_one_large_batch(
    server: str, labels: str
) -> None:
    model = torch.randn(
        VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    world, accumulate, shifted = 2, 3, labels == "shifted"
    ranks = ranks_of(f"{server}/{labels}", world, accumulate=accumulate)
    assert len(ranks[0]) == len(ranks[1]) > 8 and len(ranks[0]) % accumulate, (
        "an optimiser step is to be incomplete"
    )
    counts = []
    for first in range(0, len(ranks[0]), accumulate):
        micro = [batch for rank in ranks for batch in rank[first : first + accumulate]]
        (count,) = {batch["global_label_tokens"] for batch in micro}
        total = torch.stack([loss_of(model, batch, shifted) / count for batch in micro]).sum()
        large: Any = {
            name: torch.cat([batch[name] for batch in micro]) for name in ("input_ids", "labels")
        }  # type: ignore[literal-required]
        torch.testing.assert_close(total, loss_of(model, large, shifted, "mean"))
        counts.append(count)
    assert len(set(counts)) > 2, "all optimiser steps have equally many labels"
    # As ranks that each took the mean of its own labels would not have it: that is what the number is for.
    means = torch.stack(
        [
            loss_of(model, batch, shifted, "mean")
            for batch in micro
            if (batch["labels"] != -100).any()
        ]
    )
    assert not torch.allclose(means.mean(), total)


class Ranks:
    """Of which there are two."""

    world_size = 2


@pytest.mark.parametrize("labels", ["same", "shifted"])
def test_the_loss_of_a_step_averaged_over_ranks_is_the_mean_over_its_labels_and_0_where_all_is_padding(
    labels: str,
) -> None:
    shifted, generator = labels == "shifted", torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 8, VOCABULARY, generator=generator, requires_grad=True)
    ids = torch.randint(VOCABULARY, (2, 3, 8), generator=generator)
    ids[0, 2, 5:] = ids[1] = IGNORED  # of rank 1 all
    counted = ids[..., 0 if shifted else 1 :]
    batches = [
        {"labels": rank, "global_label_tokens": int((counted != IGNORED).sum())} for rank in ids
    ]
    parts = [
        mean_loss(token_losses(own, batch["labels"], shifted=shifted), batch, Ranks())
        for own, batch in zip(logits, batches, strict=True)
    ]
    expected = cross_entropy(
        (logits[0] if shifted else logits[0, :, :-1]).flatten(0, 1),
        counted[0].flatten(),
        ignore_index=IGNORED,
    )
    torch.testing.assert_close(torch.stack(parts).mean(), expected)
    assert parts[1] == 0
    torch.stack(parts).mean().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()

    nothing = {"labels": ids[1], "global_label_tokens": 0}
    assert mean_loss(torch.zeros(3, 7), nothing, Ranks()) == 0
    for wrong in (
        {"global_label_tokens": 0},
        {"global_label_tokens": 0, "labels": ids[0]},
        batches[0],
    ):
        with pytest.raises(ValueError, match="expected a loss for each token"):
            mean_loss(torch.zeros(3) if wrong is batches[0] else torch.zeros(3, 8), wrong, Ranks())


def test_an_optimiser_step_is_waited_for_as_a_whole_or_to_the_end_of_the_data() -> None:
    # Steps of 2 samples of 8 tokens; the last of the 7 has one sample of padding.
    script = Script(end_index=13, pad_last_step=True, shifted=True)
    with (
        serving(script) as (server, url, _),
        RemoteDataset(url, 2, accumulate=3, connection=ahead(3)) as dataset,
    ):
        batches = [(batch["global_tokens"], batch["global_label_tokens"]) for batch in dataset]
        assert {progress.credit_micro_steps for progress in server.progress} == {3}

    assert batches == [(16, 48)] * 6 + [(8, 8)]


def test_a_stream_that_breaks_within_an_optimiser_step_changes_nothing() -> None:
    broken: list[int] = []

    def breaks(stream: int, begin: int) -> str | None:
        if begin >= 4 and stream < 4 and begin not in broken:
            broken.append(begin)
            return ""
        return None

    script = Script(end_index=18, on_message=breaks)
    with serving(script) as (_, url, _), RemoteDataset(url, 1, accumulate=4) as dataset:
        batches = [(batch["sample_index"], batch["global_label_tokens"]) for batch in dataset]

    assert broken
    assert batches == [(index, 4 * 7 if index <= 16 else 2 * 7) for index in range(1, 19)]


def test_who_waits_for_an_optimiser_step_is_told_of_an_error_before_its_first_batch() -> None:
    script = Script(on_message=lambda _, begin: "SourceError" if begin >= 4 else None)
    with serving(script) as (_, url, _), RemoteDataset(url, 1, accumulate=3) as dataset:
        batches = iter(dataset)
        assert [next(batches)["sample_index"] for _ in range(3)] == [1, 2, 3]
        with pytest.raises(SourceError, match="as the script says, at 4"):
            next(batches)
        assert dataset.sample_index == 3
        assert eventually(lambda: dataset.end_reason is None)

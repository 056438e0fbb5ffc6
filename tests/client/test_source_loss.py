"""Losses by source: sums against a slow computation of their own, and reports that never stand in training's way."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_server import FakeServer, Script, eventually, serving
from tokenloom import (
    LaunchOptions,
    MeanLosses,
    PeekDataset,
    RemoteDataset,
    SourceLoss,
    token_losses,
)
from tokenloom.connection import calls
from torch.nn import functional

LENGTH = 8


@pytest.fixture(scope="module", params=["same", "shifted"])
def dataset(request: pytest.FixtureRequest) -> Iterator[RemoteDataset]:
    """Joined, of two sources a and b."""
    with (
        serving(Script(shifted=request.param == "shifted")) as (_, url, _),
        RemoteDataset(url, 2) as opened,
    ):
        next(iter(opened))
        assert opened.labels == request.param
        yield opened


def random_batch(draw: random.Random, samples: int) -> dict[str, Any]:
    labels = [[draw.choice((-100, 5, 9)) for _ in range(LENGTH)] for _ in range(samples)]
    return {
        "source_ids": torch.tensor([draw.choice((-1, 0, 1)) for _ in range(samples)]),
        "labels": torch.tensor(labels),
        "sample_index": draw.randrange(1000),
        "total_tokens": draw.randrange(10_000),
    }


def slowly(
    added: list[tuple[torch.Tensor, dict[str, Any]]], shifted: bool
) -> dict[int, tuple[float, int]]:
    """By source: the mean loss over its tokens, and how many these are; token by token."""
    found: dict[int, list[float]] = {}
    for losses, batch in added:
        for sample, source in enumerate(batch["source_ids"].tolist()):
            labels = batch["labels"][sample].tolist()
            if losses.dim() == 1:
                own = [losses[sample].item()] * sum(
                    label != -100 for label in labels[0 if shifted else 1 :]
                )
            else:
                own = [
                    loss
                    for loss, label in zip(
                        losses[sample].tolist(), labels[LENGTH - losses.shape[1] :], strict=True
                    )
                    if label != -100
                ]
            if source != -1 and own:
                found.setdefault(source, []).extend(own)
    return {source: (math.fsum(each) / len(each), len(each)) for source, each in found.items()}


@pytest.mark.parametrize("width", [None, LENGTH, LENGTH - 1])
def test_sums_are_those_of_a_slow_computation(dataset: RemoteDataset, width: int | None) -> None:
    draw = random.Random(str(width))
    source_loss = SourceLoss(dataset)
    names = {source.id: source.alias for source in dataset.sources}
    for _ in range(3):  # each reduction begins anew
        added = []
        for samples in (1, 4, 7):
            batch = random_batch(draw, samples)
            losses = torch.tensor(
                [draw.uniform(0, 9) for _ in range(samples * (width or 1))], requires_grad=True
            ).reshape(samples, *([] if width is None else [width]))
            # What does not count may be anything.
            losses = losses.masked_fill(
                batch["source_ids"].reshape(-1, *([1] * (losses.dim() - 1))) == -1, math.nan
            )
            source_loss.add(losses, batch)
            added.append((losses, batch))
        expected = slowly(added, dataset.labels == "shifted")
        found = source_loss.reduce()
        assert found.by_id.keys() == expected.keys()
        for source, (loss, tokens) in expected.items():
            name = names[source]
            assert found.losses[name] == pytest.approx(loss, rel=1e-6)
            assert found.tokens[name] == tokens
        total = sum(tokens for _, tokens in expected.values())
        assert found.loss == pytest.approx(
            sum(loss * n for loss, n in expected.values()) / total, rel=1e-6
        )
        assert (found.sample_index, found.total_tokens) == (
            batch["sample_index"],
            batch["total_tokens"],
        )
    assert source_loss.reduce().losses == {}


def test_a_token_that_does_not_count_may_have_no_number(dataset: RemoteDataset) -> None:
    source_loss = SourceLoss(dataset)
    labels = torch.tensor([[1, 2, -100, 3, 4, 5, 6, 7], [-100] * LENGTH])
    losses = torch.ones(2, LENGTH)
    losses[labels == -100] = math.inf
    source_loss.add(losses, {"source_ids": torch.tensor([0, 1]), "labels": labels})
    assert source_loss.reduce().by_id == {0: (1.0, 7)}
    # Per sample: the mean over no token.
    source_loss.add(
        torch.tensor([2.0, math.nan]), {"source_ids": torch.tensor([0, 1]), "labels": labels}
    )
    found = source_loss.reduce()
    assert found.by_id == {0: (2.0, 7 if dataset.labels == "shifted" else 6)}


def test_rows_without_labels_count_by_sample_or_by_number(dataset: RemoteDataset) -> None:
    source_loss = SourceLoss(dataset)
    source_loss.add(torch.tensor([1.0, 3.0, 5.0]), {"source_ids": torch.tensor([0, 0, -1])})
    assert source_loss.reduce().by_id == {0: (2.0, 2)}
    source_loss.add(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), {"source_ids": torch.tensor([1, 1])})
    assert source_loss.reduce().by_id == {1: (4.0, 4)}


def test_half_precision_losses_are_summed_in_full(dataset: RemoteDataset) -> None:
    source_loss = SourceLoss(dataset)
    losses = torch.full((64, 512), 0.1, dtype=torch.bfloat16)
    for _ in range(4):
        source_loss.add(losses, {"source_ids": torch.zeros(64, dtype=torch.int64)})
    assert source_loss.reduce().by_id == {
        0: (pytest.approx(losses[0, 0].item(), rel=1e-12), 4 * 64 * 512)
    }


def test_losses_of_another_shape_are_refused(dataset: RemoteDataset) -> None:
    source_loss = SourceLoss(dataset)
    with pytest.raises(RuntimeError, match="no loss was added yet"):
        source_loss.reduce()
    batch = {"source_ids": torch.tensor([0, 1]), "labels": torch.ones(2, LENGTH, dtype=torch.int64)}
    for shape in ([], [3], [2, LENGTH - 2], [2, LENGTH + 1], [2 * LENGTH], [2, LENGTH, 5]):
        with pytest.raises(ValueError, match=r"losses have the shape \[.*expected"):
            source_loss.add(torch.zeros(shape), batch)


def test_sources_that_come_at_once_in_great_numbers_count_in_the_whole_and_from_then_on_by_name(
    dataset: RemoteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    source_loss = SourceLoss(dataset)
    batch = {"source_ids": torch.tensor([0, 67, 1000])}
    source_loss.add(torch.tensor([1.0, 2.0, 6.0]), batch)
    found = source_loss.reduce()
    name = dataset.sources[0].alias
    assert found.losses == {name: 1.0, "source 67": 2.0}
    assert found.loss == 3.0
    assert "1 tokens are of sources that came since the last reduction" in caplog.text
    while len(found.losses) < 3:
        source_loss.add(torch.tensor([1.0, 2.0, 6.0]), batch)
        found = source_loss.reduce()
    assert found.losses == {name: 1.0, "source 67": 2.0, "source 1000": 6.0}


def test_ranks_without_a_process_group_are_told(dataset: RemoteDataset) -> None:
    with (
        serving(Script()) as (_, url, _),
        RemoteDataset(url, 1, rank=0, world_size=2, launch=LaunchOptions(attempt="a")) as rank,
    ):
        batch = next(iter(rank))
        source_loss = SourceLoss(rank)
        source_loss.add(torch.ones(1), batch)
        with pytest.raises(RuntimeError, match=r"one of 2 ranks.*init_process_group"):
            source_loss.reduce()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1024])
@pytest.mark.parametrize("shifted", [False, True])
def test_token_losses_are_the_cross_entropy_of_each_token(shifted: bool, chunk_tokens: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, LENGTH, 11, requires_grad=True)
    labels = torch.randint(0, 11, (3, LENGTH))
    labels[0, 2:5] = -100
    labels[2] = -100
    found = token_losses(logits, labels, shifted=shifted, chunk_tokens=chunk_tokens)
    probabilities = torch.log_softmax(logits.double(), dim=-1)
    first = 0 if shifted else 1
    for sample in range(3):
        for at in range(first, LENGTH):
            label = int(labels[sample, at])
            expected = 0.0 if label == -100 else -probabilities[sample, at - first, label].item()
            assert found[sample, at - first].item() == pytest.approx(expected, rel=1e-5)
    assert found.shape == (3, LENGTH - first)
    (slopes,) = torch.autograd.grad(found.sum(), logits)
    whole = functional.cross_entropy(
        (logits if shifted else logits[:, :-1]).flatten(0, 1),
        labels[:, first:].flatten(),
        reduction="sum",
    )
    torch.testing.assert_close(slopes, torch.autograd.grad(whole, logits)[0])


def test_token_losses_widen_half_precision_and_refuse_other_shapes() -> None:
    logits, labels = (
        torch.randn(1, LENGTH, 5, dtype=torch.bfloat16),
        torch.zeros(1, LENGTH, dtype=torch.int64),
    )
    found = token_losses(logits, labels, shifted=True)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, token_losses(logits.float(), labels, shifted=True))
    with pytest.raises(ValueError, match=r"expected \[B, L, V\] and \[B, L\]"):
        token_losses(logits, labels[:, 1:], shifted=True)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        token_losses(logits, labels, shifted=True, chunk_tokens=0)


# Reports


def mean_losses(index: int = 16, **losses: float) -> MeanLosses:
    by_id = {"ab".index(name): (loss, 10) for name, loss in losses.items()}
    return MeanLosses(losses, dict.fromkeys(losses, 10), 2.5, index, 8 * index, by_id)


def joined(server: FakeServer, url: str, **options: Any) -> RemoteDataset:
    dataset = RemoteDataset(url, 2, **options)
    next(iter(dataset))
    return dataset


def test_rank_0_reports_what_was_reduced() -> None:
    with serving(Script()) as (server, url, _):
        with joined(server, url) as dataset:
            source_loss = SourceLoss(dataset)
            source_loss.add(torch.tensor([1.5, 2.5]), {"source_ids": torch.tensor([0, 1])})
            found = source_loss.log(step=7, learning_rate=0.25)
            assert eventually(lambda: len(server.reports) == 1)
        (report,) = server.reports
        assert (report.run, report.generation, report.attempt) == (
            "fake",
            dataset.generation,
            dataset._request.topology.attempt,
        )
        assert (report.sample_index, report.total_tokens, report.step) == (2, 16, 7)
        assert (report.loss, report.learning_rate) == (found.loss, 0.25)
        assert [(each.source_id, each.loss, each.tokens) for each in report.sources] == [
            (0, 1.5, 1),
            (1, 2.5, 1),
        ]


def test_other_ranks_and_who_only_looks_report_nothing() -> None:
    with serving(Script()) as (server, url, _):
        ranks = [
            joined(server, url, rank=rank, world_size=2, launch=LaunchOptions(attempt="a"))
            for rank in range(2)
        ]
        for rank in reversed(ranks):
            SourceLoss(rank).report(mean_losses(a=1.0))
        for rank in ranks:
            rank.close()
        assert len(server.reports) == 1
        with (
            PeekDataset(url, 2) as looking,
            pytest.raises(ValueError, match="PeekDataset takes no part"),
        ):
            SourceLoss(looking).report(mean_losses(a=1.0))


def test_losses_that_are_no_number_are_left_out_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Script()) as (server, url, _):
        with joined(server, url) as dataset:
            source_loss = SourceLoss(dataset)
            for index in (8, 16):
                source_loss.report(mean_losses(index, a=math.nan, b=1.0))
        assert [[each.source_id for each in report.sources] for report in server.reports] == [
            [1],
            [1],
        ]
        assert caplog.text.count("the loss of a is not finite at sample 8") == 1


def test_what_the_server_refuses_is_dropped_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Script(report_errors=["Fenced", "Fenced"])) as (server, url, _):
        with joined(server, url) as dataset:
            for index in (8, 16, 24, 32):
                SourceLoss(dataset).report(mean_losses(index, a=1.0))
        assert [report.sample_index for report in server.reports] == [24, 32]
        assert caplog.text.count("losses cannot be reported") == 1
        assert "Fenced: as the script says" in caplog.text


def test_a_server_that_is_away_costs_no_time_and_gets_the_newest_reports_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "PAUSE_S", 0.05)
    caplog.set_level(logging.WARNING, "tokenloom")
    with serving(Script()) as (server, url, grpc_server):
        dataset = joined(server, url)
        grpc_server.stop(0).wait(5)
        source_loss = SourceLoss(dataset)
        for index in range(1, 2 * calls.QUEUED + 1):
            source_loss.report(mean_losses(index, a=1.0))
        assert eventually(lambda: "losses cannot be reported" in caplog.text)
        port = int(url.split(":")[2].split("/")[0])
    with serving(Script(), port) as (server, _, _):
        assert eventually(lambda: len(server.reports) >= calls.QUEUED, 20)
        dataset.close()
        got = [report.sample_index for report in server.reports]
        assert got == sorted(got)
        assert got[-calls.QUEUED :] == list(range(calls.QUEUED + 1, 2 * calls.QUEUED + 1))
        assert caplog.text.count("losses cannot be reported") == 1


def test_closing_does_not_wait_for_a_server_that_is_away() -> None:
    with serving(Script()) as (server, url, grpc_server):
        dataset = joined(server, url)
        grpc_server.stop(0).wait(5)
        SourceLoss(dataset).report(mean_losses(a=1.0))
        dataset.close()

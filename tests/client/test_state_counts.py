"""What each source gave, as a trainer's state says it: counted again from the batches of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpora import CODE, PROSE, WIKI, flat, write_corpus
from support.served import Place, over_grpc
from tokenloom import ConnectionOptions, LaunchOptions, LocalDataset, RemoteDataset
from tokenloom_proto.seal import unseal

RANKS, BATCH, LENGTH = 4, 2, 8
Counts = dict[str, dict[str, int]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A run of padded samples, with 48 of four ranks between two state boundaries."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 6)
    document = flat(
        [CODE, PROSE, WIKI], packing="none", long_rows="split", pad_id=0, window_micro_steps=12
    )
    for child in document["mixture"]["children"]:
        child["epochs"] = 5
    place = Place(write_corpus(tmp_path), tmp_path, document)
    yield place
    place.stop()


def recount(specs: dict[int, str], batches: list[Any]) -> Counts:
    counts: Counts = {}
    for batch in batches:
        for source, mask in zip(batch["source_ids"].tolist(), batch["attention_mask"], strict=True):
            own = counts.setdefault(specs[source], {"samples": 0, "tokens": 0, "real_tokens": 0})
            own["samples"] += 1
            own["tokens"] += LENGTH
            own["real_tokens"] += int(mask.sum())
    return counts


def real_of(batches: list[Any]) -> int:
    return sum(int(batch["attention_mask"].sum()) for batch in batches)


def counts_of(dataset: Any, at: int | None = None) -> Counts:
    counts: Counts = unseal(dataset.state_dict(at)["tokenloom"])["counts"]
    return counts


def specs_of(dataset: Any) -> dict[int, str]:
    return {source.id: source.spec for source in dataset.sources}


def test_ranks_that_prefetch_otherwise_and_a_launch_of_another_size_write_the_same_counts(
    place: Place,
) -> None:
    place.serve()
    with over_grpc(place.runs) as address:
        url = f"grpc://{address}/test"

        def launch(ranks: int, attempt: str, state: Any = None) -> list[RemoteDataset]:
            datasets = [
                RemoteDataset(
                    url,
                    BATCH,
                    rank=rank,
                    world_size=ranks,
                    columns=["attention_mask"],
                    launch=LaunchOptions(attempt=attempt, takeover=True),
                    connection=ConnectionOptions(prefetch_steps=1 + 3 * rank),
                )
                for rank in range(ranks)
            ]
            for dataset in datasets:
                if state is not None:
                    dataset.load_state_dict(state)
            return datasets

        first = launch(RANKS, "first")
        batches: list[Any] = []
        for _ in range(40):
            batches += [next(iter(dataset)) for dataset in first]
            states = {dataset.state_dict()["tokenloom"] for dataset in first}
            assert len(states) == 1 and counts_of(first[0]) == recount(specs_of(first[0]), batches)
            assert (
                {dataset.real_tokens for dataset in first}
                == {real_of(batches)}
                == {batches[-1]["real_tokens"]}
            )
        state = first[0].state_dict()
        assert (
            first[0].sample_index == 320
            and unseal(state["tokenloom"])["resume_state"]["sample_index"] == 288
        )
        # Of earlier batches, too, and with nobody there any more.
        for dataset in first:
            dataset.close()
        assert counts_of(first[1], 160) == recount(specs_of(first[0]), batches[: 160 // BATCH])

        second = launch(3, "second", state)
        assert second[0].real_tokens == first[0].real_tokens == real_of(batches)
        for payload in ({"datasets": [{"spec": "x"}]}, {"sample_index": 7}):
            unjoined = RemoteDataset(url, BATCH, rank=0, world_size=1)
            unjoined.load_state_dict(payload)
            with pytest.raises(
                RuntimeError, match="real_tokens: an older data loader's checkpoint was loaded"
            ):
                _ = unjoined.real_tokens
        for dataset in second:
            iter(dataset)
            assert dataset.real_tokens == real_of(batches)
        for _ in range(8):
            batches += [next(iter(dataset)) for dataset in second]
            assert [counts_of(dataset) for dataset in second] == [
                recount(specs_of(second[0]), batches)
            ] * 3
        for dataset in second:
            dataset.close()


def test_a_server_inside_the_job_tells_the_same(place: Place) -> None:
    with LocalDataset(place.path, BATCH, columns=["attention_mask"]) as dataset:
        assert dataset.real_tokens == 0
        batches: list[Any] = []
        for batch in dataset:
            batches.append(batch)
            assert counts_of(dataset) == recount(specs_of(dataset), batches)
            assert dataset.real_tokens == real_of(batches)
        assert torch.stack(
            [batch["attention_mask"] for batch in batches]
        ).sum() < BATCH * LENGTH * len(batches)

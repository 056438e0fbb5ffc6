"""What a StatefulLoader with a worker says of its state, at each moment; fails where that is wrong.

``loader_states.py URL``
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from tokenloom import Batch, PeekDataset, RemoteDataset
from tokenloom.integrations.stateful import StatefulLoader


def main(url: str) -> None:
    # Not in this process: where gRPC was used before a fork, it may hang in the fork.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        order = process.submit(_order, url).result()

    loader = StatefulLoader(
        RemoteDataset(url, 2), num_workers=1, collate_fn=_renamed, prefetch_factor=3
    )
    with pytest.raises(RuntimeError, match=r"call iter\(\) on the loader first"):
        next(loader)
    before = loader.state_dict()
    assert loader.sample_index == 0
    batches = iter(loader)
    assert _place(loader.state_dict()) == (0, 0)
    for number in range(4):
        batch = next(batches)
        assert batch["samples"] == order[number]
        # The worker is up to three batches ahead.
        assert (
            _place(loader.state_dict())
            == (loader.sample_index, loader.total_tokens)
            == (2 * number + 2, batch["t"])
        )
        assert loader.digest in loader.state_dict()["tokenloom"]
    kept = loader.state_dict(at=6)
    assert _place(kept)[0] == 6
    with pytest.raises(ValueError, match="there is no state at sample index 10"):
        loader.state_dict(at=10)  # which the worker has fetched, and the trainer has not seen
    assert next(iter(loader))["samples"] == order[4], "a second iter() goes on"
    with pytest.raises(RuntimeError, match="comes before the first iter"):
        loader.load_state_dict(kept)
    loader.close()
    assert _place(loader.state_dict())[0] == 10

    back = StatefulLoader(RemoteDataset(url, 2), num_workers=1)
    back.load_state_dict(kept)
    assert next(iter(back))["sample_ids"].tolist() == order[3]
    back.close()
    assert _place(before)[0] == 0

    again = StatefulLoader(RemoteDataset(url, 2))
    again.load_state_dict(kept)
    assert again.state_dict() == kept
    with again.dataset as dataset:
        assert next(iter(again))["sample_ids"].tolist() == order[3]
        assert again.state_dict() == dataset.state_dict()

    for options, message in (
        ({"num_workers": 2}, "num_workers must be 0 or 1"),
        ({"batch_size": 4}, "batch_size=4: the server makes batches"),
        ({"shuffle": True}, "shuffle=True: the server makes batches and their order"),
    ):
        with pytest.raises(ValueError, match=message):
            StatefulLoader(RemoteDataset(url, 2), **options)


def _order(url: str) -> list[list[int]]:
    """The samples of the first batches."""
    with PeekDataset(url, 2, at="0") as peek:
        return [batch["sample_ids"].tolist() for batch, _ in zip(peek, range(8), strict=False)]


def _renamed(batch: Batch) -> dict[str, Any]:
    return {"samples": batch["sample_ids"].tolist(), "t": batch["total_tokens"]}


def _place(state: dict[str, str]) -> tuple[int, int]:
    from tokenloom_proto.seal import unseal

    document = unseal(state["tokenloom"])
    return document["sample_index"], document["total_tokens"]


if __name__ == "__main__":
    main(sys.argv[1])

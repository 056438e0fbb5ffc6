"""Batches of rows by a real server: two ranks are killed, one goes on; and all that only looks at such a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import StartServer
from support.features import SHAPES, document, latents, write_features, write_mixture
from support.server_process import CommandLine, ServerProcess
from tokenloom import ConnectionOptions, LaunchOptions, PeekDataset, RemoteDataset
from tokenloom_proto.errors import TokenloomError

RUN = "latents"
SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("features")
    write_features(found)
    return found


@pytest.fixture(scope="module")
def server(folder: Path, serve: StartServer) -> ServerProcess:
    return serve(write_mixture(folder, document()))


@pytest.fixture(scope="module")
def whole(server: ServerProcess) -> tuple[list[dict[str, Any]], str]:
    """The run as one rank gets it, and its digest."""
    with RemoteDataset(
        server.url(RUN), rank=0, world_size=1, launch=LaunchOptions(attempt="whole")
    ) as dataset:
        return list(dataset), dataset.digest  # type: ignore[arg-type]


def test_rows_arrive_as_they_are(folder: Path, whole: tuple[list[dict[str, Any]], str]) -> None:
    rows = [
        {
            row["caption"]: row
            for path in ("0", "1")
            for row in pq.read_table(folder / f"latents/{path}.parquet").to_pylist()
        },
        {row["caption"]: row for row in latents(29, 2000).to_pylist()},
    ]
    end = 0
    for batch in whole[0]:
        assert batch["latent"].dtype is torch.float16
        assert batch["latent"].shape == (SIZE, *SHAPES[batch["bucket"]])
        assert batch["row"].dtype is torch.int64
        source = int(batch["source_ids"][0])
        assert batch["source_ids"].tolist() == [source] * SIZE
        assert batch["dataset_id"] == ("parquet:latents/*.parquet:*", "arrow:more:*")[source]
        for place, caption in enumerate(batch["caption"]):
            row = rows[source][caption]
            assert torch.equal(
                batch["latent"][place], torch.tensor(row["latent"], dtype=torch.float16)
            )
            assert (batch["aspect"][place], int(batch["row"][place])) == (row["aspect"], row["row"])
        batch["latent"] += 1  # it is the trainer's own
        assert batch["sample_ids"].tolist() == list(range(end, end + SIZE))
        end += SIZE
        assert (batch["sample_index"], batch["total_tokens"]) == (end, end)


def test_two_ranks_whose_server_is_killed_are_resumed_on_one_without_loss_or_repetition(
    server: ServerProcess, whole: tuple[list[dict[str, Any]], str]
) -> None:
    expected = [caption for batch in whole[0] for caption in batch["caption"]]
    by_sample: dict[int, str] = {}
    two = [
        RemoteDataset(
            server.url(RUN),
            rank=rank,
            world_size=2,
            launch=LaunchOptions(attempt="two"),
            resume="fresh",
            connection=ConnectionOptions(prefetch_steps=2),
        )
        for rank in range(2)
    ]
    batches = [iter(dataset) for dataset in two]
    for step in range(9):
        if step == 5:
            server.kill()
            server.start()
        pair: list[Any] = [next(each) for each in batches]
        assert pair[0]["latent"].shape == pair[1]["latent"].shape
        assert two[0].state_dict() == two[1].state_dict()
        for batch in pair:
            by_sample |= dict(zip(batch["sample_ids"].tolist(), batch["caption"], strict=True))
    assert [by_sample[index] for index in sorted(by_sample)] == expected[: 9 * SIZE]
    dataset = RemoteDataset(
        server.url(RUN),
        batch_size=SIZE,
        rank=0,
        world_size=1,
        launch=LaunchOptions(attempt="one", takeover=True),
    )
    dataset.load_state_dict(two[0].state_dict())
    with dataset:
        assert [caption for batch in dataset for caption in batch["caption"]] == expected[
            9 * SIZE :
        ]  # type: ignore[typeddict-item]
        assert dataset.digest == whole[1]
    for each in two:
        each.close()


def test_what_does_not_divide_the_global_batch_is_refused_with_the_reason(
    server: ServerProcess,
) -> None:
    options: dict[str, Any] = {
        "rank": 0,
        "resume": "fresh",
        "launch": LaunchOptions(attempt="refused", takeover=True),
    }
    for size, says in (
        (
            {"world_size": 3},
            "4 cannot be divided among 3 ranks: launch a number of ranks that divides 4",
        ),
        (
            {"world_size": 2, "batch_size": 4},
            "which are 2 for each of 2 ranks: leave batch_size out",
        ),
    ):
        with (
            RemoteDataset(server.url(RUN), **options, **size) as dataset,
            pytest.raises(TokenloomError, match=re.escape(says)),
        ):
            next(iter(dataset))


def test_whoever_looks_sees_whole_batches(
    server: ServerProcess, whole: tuple[list[dict[str, Any]], str], tokenloom: CommandLine
) -> None:
    with PeekDataset(server.url(RUN), at="9") as peek:
        batch: Any = next(iter(peek))
        assert (peek.start_index, batch["sample_ids"].tolist()) == (8, [8, 9, 10, 11])
        assert torch.equal(batch["row"], whole[0][2]["row"])
    shown = tokenloom("peek", server.url(RUN), "--at", "9", "--samples", "4", "--json")
    assert shown.status == 0, shown.output
    seen = [json.loads(line) for line in shown.output.splitlines()]
    assert [one["sample"] for one in seen] == [9, 10, 11, 12]
    expected = [caption for batch in whole[0] for caption in batch["caption"]]
    assert [one["row"]["caption"] for one in seen] == expected[9:13]
    assert {one["tokens"] for one in seen} == {1}
    assert seen[0]["row"]["latent"] == f"float16 {list(SHAPES[seen[0]['row']['bucket']])}"


def test_a_fork_goes_on_in_the_same_batches_and_another_way_of_making_them_is_refused(
    folder: Path, start_server: StartServer
) -> None:
    children = [
        {"source": "parquet:latents/*.parquet:*", "epochs": 2},
        {"source": "arrow:more:*", "weight": 3},
    ]
    mixture = {"policy": "weighted", "children": children}
    mixtures = []
    for name, fields in (
        ("base", {}),
        ("fork", {"mixture": mixture}),
        ("other", {"mixture": mixture, "seed": 6}),
    ):
        mixtures.append(folder / f"{name}.yaml")
        mixtures[-1].write_text(yaml.safe_dump(document(run=name, **fields)))
    server = start_server(*mixtures)
    with RemoteDataset(
        server.url("base"), rank=0, world_size=1, launch=LaunchOptions(attempt="base")
    ) as base:
        begun: list[Any] = [batch for batch, _ in zip(base, range(5), strict=False)]
        state = base.state_dict(20)
    with RemoteDataset(
        server.url("fork"),
        rank=0,
        world_size=1,
        launch=LaunchOptions(attempt="fork", fork_from=state),
    ) as fork:
        rest: list[Any] = list(fork)
    assert rest[0]["sample_ids"].tolist() == [20, 21, 22, 23]
    of_more = [
        caption
        for batch in begun + rest
        if batch["dataset_id"] == "arrow:more:*"
        for caption in batch["caption"]
    ]
    assert len(set(of_more)) == len(of_more), "each row once, whichever run had it"
    with (
        RemoteDataset(
            server.url("other"), rank=0, world_size=1, launch=LaunchOptions(attempt="older")
        ) as older,
        pytest.raises(
            TokenloomError, match="an older data loader's checkpoint names rows of files"
        ),
    ):
        entry = {"spec": "arrow:more:*", "shard": "more/data-00000-of-00001.arrow", "row_offset": 4}
        older.load_state_dict({"resume_state": {"datasets": [entry]}})
        next(iter(older))
    other = RemoteDataset(
        server.url("other"),
        rank=0,
        world_size=1,
        launch=LaunchOptions(attempt="other", fork_from=state),
    )
    with other, pytest.raises(TokenloomError, match="seed is 5 in run 'base' and 6 in 'other'"):
        next(iter(other))

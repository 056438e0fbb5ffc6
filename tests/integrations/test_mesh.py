"""Model-parallel groups from a DeviceMesh: the example, killed and resumed; what peers are told; slices."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.forks import Forks
from support.killed import EXAMPLES, kill_and_resume, same_runs, two_runs
from support.scripts import launch
from tokenloom import Batch, PeekDataset
from tokenloom.datasets.peer_line import frame_layout, read_frame, write_frame
from tokenloom.integrations.mesh import context_slice
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer


@pytest.mark.parametrize(
    ("processes_per_rank", "arguments"),
    [
        pytest.param(4, ["--tp", 2, "--pp", 2], id="TP2-PP2-DP2"),
        pytest.param(2, ["--cp", 2, "--load-balanced"], id="CP2-DP2"),
    ],
)
def test_a_job_on_a_mesh_goes_on_with_other_replicas(
    processes_per_rank: int, arguments: list[object], torch_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            torch_forks,
            EXAMPLES / "model_parallel.py",
            urls,
            tmp_path,
            world_size=2 * processes_per_rank,
            resumed_world_sizes=[processes_per_rank],
            processes_per_rank=processes_per_rank,
            arguments=arguments,
        )


def test_peers_get_their_leaders_batches_states_and_errors(
    torch_forks: Forks, tmp_path: Path
) -> None:
    sources = {"fables": "txt:data/fables.txt:text", "glossary": "jsonl:data/glossary.jsonl:text"}
    children = [{"alias": alias, "source": source} for alias, source in sources.items()]
    mixture = {"policy": "least_consumed", "children": children}
    with same_runs(tmp_path, 1, mixture=mixture, sequence_length=64) as (url,):
        script = Path(__file__).with_name("mesh_peers.py")
        job = launch(torch_forks, script, [url, tmp_path], world_size=4, folder=tmp_path / "job")
        deadline = time.monotonic() + 400
        while None in job.statuses() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert job.statuses() == [-9, 0, 0, 0], job.output[-4000:]
        with PeekDataset(url, 1, at="0", columns=["position_ids"]) as peek:
            order = {int(batch["sample_ids"]): batch for batch in peek}
    lines = [
        [
            json.loads(line)
            for line in (tmp_path / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for rank in range(4)
    ]

    def told(rank: int, what: str) -> list[dict[str, Any]]:
        return [line for line in lines[rank] if line["what"] == what]

    def error(rank: int, what: str) -> tuple[str, str]:
        (line,) = told(rank, what)
        return line["error"], line["message"]

    assert [
        (told(rank, "start")[0]["rank"], told(rank, "start")[0]["leads"]) for rank in range(4)
    ] == [
        *((0, True), (0, False)),
        *((1, True), (1, False)),
    ]
    batches = [told(rank, "batch") for rank in range(4)]
    assert len(batches[0]) > 5
    for leader, peer in ((0, 1), (2, 3)):
        assert batches[leader] == batches[peer]
        assert told(leader, "end") == told(peer, "end")
        assert "glossary" in told(peer, "end")[0]["sources"][1]
        assert told(leader, "resumed") == told(peer, "resumed")
        assert (
            told(leader, "resumed")[0]["columns"]["input_ids"]
            == batches[leader][2]["columns"]["input_ids"]
        )
        assert error(leader, "an option")[0] == "ValueError"
        kind, message = error(peer, "an option")
        assert kind == "RuntimeError"
        assert "ValueError: columns must be a sequence of 'position_ids', " in message
        assert "got 'lengths'" in message
        assert f"global rank {leader}, which leads" in message
        assert (
            error(leader, "no run")[0]
            == error(peer, "no run")[0]
            == error(peer, "no run, again")[0]
            == "NotFound"
        )
        assert error(peer, "after the end")[0] == "StopIteration"
        assert told(leader, "other states")[0]["error"] is None
        kind, message = error(peer, "other states")
        assert kind == "JoinRefused"
        assert "loaded another state than the leader" in message
    for rank in range(4):
        assert "must name dimensions of the mesh" in error(rank, "no dimension")[1]
        assert "the mesh has 2 processes and the job 4" in error(rank, "a part")[1]
    assert [line["state"] for line in batches[0]] == [line["state"] for line in batches[2]]
    assert error(2, "closed")[1] in error(3, "closed")[1]
    assert error(1, "the leader is gone")[0] in ("RuntimeError", "DistBackendError")
    seen = [
        sample
        for rank in (0, 2)
        for line in batches[rank]
        for sample in zip(*_rows(line["columns"]), strict=True)
    ]
    assert len(seen) == 4 * len(batches[0])
    for index, ids, positions in seen:
        assert order[index]["input_ids"][0].tolist() == ids
        assert order[index]["position_ids"][0].tolist() == positions


def _rows(columns: dict[str, Any]) -> list[Any]:
    assert columns["cu_seqlens"][0] == "torch.int32"
    return [columns[name][1] for name in ("sample_ids", "input_ids", "position_ids")]


def test_any_batch_that_a_run_gives_is_handed_on_but_for_bytes() -> None:
    rows: Any = {
        "pixels": torch.rand(2, 3, 5).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.empty(2, 0, 4),
        "caption": ["a caption", "ein Bild: ä"],
        "bucket": "wide",
        "sample_index": 2**40,
    }

    layout = json.loads(json.dumps(frame_layout(rows)))
    body = np.empty(layout["bytes"], np.uint8)
    write_frame(rows, layout, body)
    found: Any = read_frame(body, layout)

    assert set(found) == set(rows)
    for name, value in rows.items():
        same = (
            torch.equal(found[name], value)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        )
        assert same, name
    assert found["pixels"].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="column 'blob' has a bytes, which is not handed on"):
        frame_layout({**rows, "blob": [b"1"]})


def _batch(length: int, *, shifted: bool) -> Batch:
    ids = torch.arange(2 * (length + 1)).reshape(2, -1)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:] if shifted else ids[:, :-1].clone()}
    batch |= {
        "loss_mask": torch.ones(2, length, dtype=torch.int64),
        "source_ids": torch.zeros(2, dtype=torch.int64),
    }
    return batch  # type: ignore[return-value]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("load_balanced", [False, True])
def test_a_context_slice_predicts_each_id_once_from_the_one_before_it(
    load_balanced: bool, shifted: bool
) -> None:
    batch, size = _batch(24, shifted=shifted), 3

    slices = [
        context_slice(
            batch, rank, size, labels="shifted" if shifted else "same", load_balanced=load_balanced
        )
        for rank in range(size)
    ]

    order = torch.arange(24)[None]
    if load_balanced:
        order = _HeadTailLoadBalancer(24, size, "cpu")._generate_indices()
    for rank, part in enumerate(slices):
        places = order[0, rank * 8 : (rank + 1) * 8]
        assert part["input_ids"].tolist() == batch["input_ids"][:, places].tolist()
        assert part["position_ids"].tolist() == [places.tolist()] * 2
        assert part["source_ids"] is batch["source_ids"]
        counts = part["labels"] != -100
        assert counts.tolist() == part["loss_mask"].bool().tolist()
        assert (part["labels"] == part["input_ids"] + 1)[counts].all()
    counted = sum(int(part["loss_mask"].sum()) for part in slices)
    assert counted == 2 * (24 if shifted else 23)


def test_positions_that_begin_with_each_document_stay() -> None:
    batch = _batch(8, shifted=True)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]] * 2)

    part = context_slice(batch, 1, 2, labels="shifted")

    assert part["position_ids"].tolist() == [[1, 0, 1, 2]] * 2


def test_a_sequence_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="24 tokens cannot be cut into 10 equal parts"):
        context_slice(_batch(24, shifted=True), 0, 5, labels="shifted", load_balanced=True)
    with pytest.raises(ValueError, match="rank 5 is not one of 5"):
        context_slice(_batch(25, shifted=True), 5, 5, labels="shifted")

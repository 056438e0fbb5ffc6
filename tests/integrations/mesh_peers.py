"""What each process of a mesh of two replicas, one shard and two tensor-parallel processes gets, and what it meets.

``mesh_peers.py URL FOLDER`` writes ``FOLDER/RANK.jsonl``, a line for each thing; at its end the first process, which
leads, kills itself in the middle of a run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenloom import ConnectionOptions
from tokenloom.integrations.mesh import GroupDataset, mesh_dataset
from torch.distributed.device_mesh import init_device_mesh

HSDP = ("replicate", "shard")


def main(url: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=(*HSDP, "tp"))
    file = (folder / f"{dist.get_rank()}.jsonl").open("w", encoding="utf-8")

    def tell(**line: Any) -> None:
        file.write(json.dumps(line) + "\n")
        file.flush()

    def tell_error(what: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            tell(what=what, error=type(error).__name__, message=str(error))
        else:
            tell(what=what, error=None)

    def dataset_of(address: str = url, **options: Any) -> GroupDataset:
        return mesh_dataset(address, mesh, 2, dp=HSDP, **options)

    tell_error("an option", lambda: dataset_of(columns=["lengths"]))
    tell_error("no dimension", lambda: mesh_dataset(url, mesh, 2, dp="dp"))
    tell_error("a part", lambda: mesh_dataset(url, mesh["tp"], 2, dp="tp"))
    with dataset_of(
        url + "-not-there", connection=ConnectionOptions(connect_timeout_s=20)
    ) as dataset:
        tell_error("no run", lambda: iter(dataset))
        tell_error("no run, again", lambda: next(iter(dataset)))

    with dataset_of(columns=["position_ids", "document_ids", "cu_seqlens"]) as dataset:
        tell(
            what="start",
            rank=dataset.rank,
            of=dataset.world_size,
            leads=dataset.leads,
            state=dataset.state_dict(),
        )
        states = []
        for batch in dataset:
            columns = {name: _plain(value) for name, value in batch.items()}
            states.append(dataset.state_dict())
            assert states[-1] == dataset.state_dict(at=batch["sample_index"])
            assert dataset.real_tokens == batch["real_tokens"] > 0
            tell(
                what="batch",
                columns=columns,
                state=states[-1],
                digest=dataset.digest,
                tokens=dataset.total_tokens,
            )
            batch["labels"] += (
                1  # is a tensor of its own: to write into it changes no other, nor their versions
            )
            assert batch["input_ids"]._version == 0
            assert _plain(batch["input_ids"]) == columns["input_ids"]
        known = {
            "labels": dataset.labels,
            "length": dataset.sequence_length,
            "sources": list(map(str, dataset.sources)),
        }
        tell(what="end", reason=dataset.end_reason, generation=dataset.generation, **known)
        tell_error("after the end", lambda: next(dataset))

    with dataset_of() as dataset:
        dataset.load_state_dict(states[2 if dataset.leads else 1])
        tell_error("other states", lambda: iter(dataset))
    dist.barrier()

    with dataset_of() as dataset:
        dataset.load_state_dict(states[1])
        assert dataset.state_dict() == states[1]
        batches = iter(dataset)
        assert dataset.state_dict() == states[1]
        tell(what="resumed", columns={name: _plain(value) for name, value in next(batches).items()})
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            tell_error("the leader is gone", lambda: next(batches))
        elif dataset._dataset is not None:
            dataset._dataset.close()  # behind its back: its next call meets that
        tell_error("closed", lambda: next(batches))
    os._exit(0)  # who leads the other group would wait for the one that is gone


def _plain(value: Any) -> Any:
    return [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""A trainer as a launcher starts it, and what all its lives received. As a program: one rank.

Each rank takes its slot from the process group, resumes from the job's checkpoint where there is one, and
meets the others at each step, as training does with its gradients. It may be told to kill itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.trainer import Receipt, Sample

CHECKPOINT = "checkpoint.json"
#: A crash at this step happens before the rank has made its dataset, for which the others wait.
BEFORE_THE_DATASET = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What all ranks received between two restarts."""

    attempt: str
    generation: int
    world_size: int
    start: int
    receipt: Receipt


def lives(folder: Path) -> list[Life]:
    """The lives of a job in their order, those that received nothing included; their ranks must agree."""
    found: dict[int, Life] = {}
    ranks: dict[int, set[int]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        # The last line may be half written, by a rank that was killed or is at it.
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        if not lines:
            continue
        head, *batches = lines
        rank, number = head.pop("rank"), head["generation"]
        life = found.setdefault(number, Life(**head, receipt=Receipt()))
        assert Life(**head, receipt=life.receipt) == life, (
            f"the ranks of generation {number} disagree"
        )
        assert rank not in ranks.setdefault(number, set()), (
            f"rank {rank} came twice in generation {number}"
        )
        ranks[number].add(rank)
        for samples in batches:
            for index, source, ids in samples:
                assert index not in life.receipt.samples, f"sample {index} came twice"
                life.receipt.samples[index] = Sample(source, tuple(ids))
    return [found[number] for number in sorted(found)]


def trained_on(job: list[Life]) -> list[Sample]:
    """The samples that the final weights have seen: of each life, those before the checkpoint of the next."""
    kept = Receipt()
    for life, following in zip(job, [*job[1:], None], strict=True):
        samples = life.receipt.samples
        end = following.start if following is not None else max(samples) + 1
        for index in range(life.start, end):
            assert index not in kept.samples, f"sample {index} was trained on twice"
            kept.samples[index] = samples[index]
    return kept.sequence()


def _train(plan: Mapping[str, Any]) -> None:
    import torch.distributed as dist
    from tokenloom import ConnectionOptions, RemoteDataset

    folder = Path(plan["folder"])
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def die_at(step: int) -> None:
        if {"life": life, "rank": rank, "step": step} in plan["crashes"]:
            os.kill(os.getpid(), signal.SIGKILL)

    die_at(BEFORE_THE_DATASET)
    dataset = RemoteDataset(
        plan["url"],
        plan["batch_size"],
        connection=ConnectionOptions(connect_timeout_s=30.0, prefetch_steps=4),
    )
    if (folder / CHECKPOINT).exists():
        dataset.load_state_dict(json.loads((folder / CHECKPOINT).read_text(encoding="utf-8")))
    batches = iter(dataset)
    head = {
        "rank": rank,
        "attempt": dataset._request.topology.attempt,
        "generation": dataset.generation,
        "world_size": dataset.world_size,
        "start": dataset.start_index,
    }
    with (folder / f"rank-{rank}-{os.getpid()}.jsonl").open("w", encoding="utf-8") as receipt:
        print(json.dumps(head), file=receipt, flush=True)
        step = 0
        while dataset.sample_index < plan["until"]:
            batch = next(batches)
            columns = (
                batch["sample_ids"].tolist(),
                batch["source_ids"].tolist(),
                batch["input_ids"].tolist(),
            )
            print(json.dumps(list(zip(*columns, strict=True))), file=receipt, flush=True)
            step += 1
            die_at(step)
            dist.barrier()
            if not rank and step % plan["checkpoint_every"] == 0:
                draft = folder / f"{CHECKPOINT}.{os.getpid()}"
                draft.write_text(json.dumps(dataset.state_dict()), encoding="utf-8")
                draft.replace(folder / CHECKPOINT)
    dataset.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _train(json.loads(sys.argv[1]))

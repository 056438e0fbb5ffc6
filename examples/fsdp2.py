"""FSDP2 (``fully_shard``) with distributed checkpoints, killed and resumed at will, on any number of ranks.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 2 examples/fsdp2.py grpc://127.0.0.1:50051/sample --checkpoint checkpoint

What Tokenloom needs of a trainer is marked 1 to 3; everything else is ordinary PyTorch. The checkpoint is resharded
when the number of ranks has changed; of the data it holds one text, the same for all ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenloom import RemoteDataset, TokenLRScheduler, mean_loss, token_losses
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Sharded(Stateful):
    """Model and optimizer, as DCP saves and reshards them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main(options: argparse.Namespace) -> None:
    """One rank."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    # 1. Rank and world size come from torch.distributed.
    dataset = RemoteDataset(options.url, options.batch_size, resume=options.resume)
    # The run says how many ids and how long its samples are.
    ids, target_tokens = dataset.vocab_size, options.samples * dataset.sequence_length
    model = torch.nn.Sequential(torch.nn.Embedding(ids, 32), torch.nn.Linear(32, ids))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = TokenLRScheduler(
        optimizer, warmup_tokens=4096, target_tokens=target_tokens
    )  # 2. in tokens

    # 3. What has a state_dict() is saved by it: the dataset and the scheduler as they are.
    state = {"sharded": Sharded(model, optimizer), "scheduler": scheduler, "dataset": dataset}
    saved = whole_checkpoints(options.checkpoint)
    if saved:
        dcp.load(state, checkpoint_id=saved[-1])

    batches = (
        dataset if dataset.sample_index < options.samples else []
    )  # one that is done is not trained further
    for step, batch in enumerate(batches, start=1):
        loss = mean_loss(
            token_losses(model(batch["input_ids"]), batch["labels"], shifted=False), batch, dataset
        )
        optimizer.zero_grad()
        loss.backward()
        scheduler.step(batch["total_tokens"])
        optimizer.step()

        dist.all_reduce(total := loss.detach().clone())
        record(
            options, rank, dataset, total.item() / dist.get_world_size(), scheduler.get_last_lr()[0]
        )
        if step % options.every == 0:
            dcp.save(state, checkpoint_id=options.checkpoint / f"{dataset.sample_index:012}")
        if dataset.sample_index >= options.samples:
            break
    dataset.close()
    dist.destroy_process_group()


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those that were saved to their end, the newest last: DCP writes its metadata when all else is there."""
    return sorted(metadata.parent for metadata in folder.glob("*/.metadata"))


def record(
    options: argparse.Namespace, rank: int, dataset: RemoteDataset, loss: float, lr: float
) -> None:
    """What was trained, for people and for ``--record``."""
    if rank:
        return
    print(
        f"samples {dataset.sample_index}  tokens {dataset.total_tokens}  loss {loss:.4f}  lr {lr:.2e}",
        flush=True,
    )
    if options.record:
        line = {
            "sample_index": dataset.sample_index,
            "digest": dataset.digest,
            "loss": loss,
            "lr": lr,
        }
        with options.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="grpc://host:port/run")
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--samples", type=int, default=800, help="of the whole run, over all ranks")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("checkpoint"),
        help="folder to save to and to resume from",
    )
    parser.add_argument(
        "--resume",
        default="fresh",
        help="where it begins without a checkpoint: fresh, latest or a snapshot",
    )
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--record", type=Path, help="file for a JSON line per step")
    main(parser.parse_args())

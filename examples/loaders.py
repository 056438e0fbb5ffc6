"""Distributed training through a DataLoader, killed and resumed at will, on any number of ranks.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 2 examples/loaders.py grpc://127.0.0.1:50051/sample --loader stateful --workers 1

A ``RemoteDataset`` fetches its batches in the background, so it needs no DataLoader. Where a trainer wants one, these
give the state of the batch trained on (docs/integrations/pytorch.md):

    torch      dataset.dataloader(): torch's DataLoader without a worker; the state is the dataset's
    stateful   tokenloom's StatefulLoader around torch's, with no worker or one
    torchdata  torchdata's StatefulDataLoader, with no worker or one
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenloom import Batch, RemoteDataset, TokenLRScheduler, mean_loss, token_losses
from tokenloom.integrations.stateful import StatefulLoader
from torch.nn.parallel import DistributedDataParallel


def loader_of(dataset: RemoteDataset, name: str, workers: int) -> tuple[Iterable[Batch], Any]:
    """A loader, and what has its state."""
    if name == "torch":
        if workers:
            raise SystemExit("a worker's state stays in the worker: use --loader stateful")
        return dataset.dataloader(), dataset
    if name == "stateful":
        loader = StatefulLoader(dataset, num_workers=workers)
        return loader, loader
    from torchdata.stateful_dataloader import StatefulDataLoader

    other: StatefulDataLoader[Batch] = StatefulDataLoader(
        dataset, batch_size=None, num_workers=workers
    )
    return other, other


def main(options: argparse.Namespace) -> None:
    """One rank."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    dataset = RemoteDataset(options.url, options.batch_size, resume=options.resume)
    loader, stateful = loader_of(dataset, options.loader, options.workers)
    # The run says how many ids and how long its samples are.
    ids, target_tokens = dataset.vocab_size, options.samples * dataset.sequence_length
    model = torch.nn.Sequential(torch.nn.Embedding(ids, 32), torch.nn.Linear(32, ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = TokenLRScheduler(optimizer, warmup_tokens=4096, target_tokens=target_tokens)

    saved = options.checkpoint / "last.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)  # safe from torch 2.10 on
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        stateful.load_state_dict(state["loader"])
    replica = DistributedDataParallel(model)

    for step, batch in enumerate(loader, start=1):
        loss = mean_loss(
            token_losses(replica(batch["input_ids"]), batch["labels"], shifted=False),
            batch,
            dataset,
        )
        optimizer.zero_grad()
        loss.backward()
        scheduler.step(batch["total_tokens"])
        optimizer.step()

        dist.all_reduce(total := loss.detach().clone())
        dist.all_reduce(checksum := checksum_of(batch))
        lr = scheduler.get_last_lr()[0]
        record(options, rank, batch, total.item() / dist.get_world_size(), lr, str(checksum.item()))
        if step % options.every == 0 and rank == 0:
            options.checkpoint.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "loader": stateful.state_dict()}
            torch.save(state, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)
        if batch["sample_index"] >= options.samples:
            break
    dataset.close()
    dist.destroy_process_group()


def checksum_of(batch: Batch) -> torch.Tensor:
    """A sum over the samples of each one's ids and place, which does not depend on who has which of them."""
    places = torch.arange(1, batch["input_ids"].shape[1] + 1)
    return ((batch["input_ids"] * places).sum(1) * (batch["sample_ids"] + 1)).sum()


def record(
    options: argparse.Namespace, rank: int, batch: Batch, loss: float, lr: float, digest: str
) -> None:
    """What was trained, for people and for ``--record``."""
    if rank:
        return
    print(
        f"samples {batch['sample_index']}  tokens {batch['total_tokens']}  loss {loss:.4f}  lr {lr:.2e}",
        flush=True,
    )
    if options.record:
        line = {"sample_index": batch["sample_index"], "digest": digest, "loss": loss, "lr": lr}
        with options.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="grpc://host:port/run")
    parser.add_argument("--loader", choices=("torch", "stateful", "torchdata"), default="stateful")
    parser.add_argument("--workers", type=int, choices=(0, 1), default=0)
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

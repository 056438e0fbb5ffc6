"""DistributedDataParallel, killed and resumed at will, on any number of ranks.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 2 examples/ddp.py grpc://127.0.0.1:50051/sample --checkpoint checkpoint

With no server to run, the path of the mixture file stands in the address's place, and rank 0 starts one:

    torchrun --nproc-per-node 2 examples/ddp.py examples/compose/mixture.yaml --checkpoint checkpoint

What Tokenloom needs of a trainer is marked 1 to 4; everything else is ordinary PyTorch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from tokenloom import RemoteDataset, TokenLRScheduler, mean_loss, token_losses
from torch.nn.parallel import DistributedDataParallel


def main(options: argparse.Namespace) -> None:
    """One rank."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    # 1. Rank and world size come from torch.distributed.
    dataset = RemoteDataset(options.url, options.batch_size, resume=options.resume)
    # The run says how many ids and how long its samples are.
    ids, target_tokens = dataset.vocab_size, options.samples * dataset.sequence_length
    model = torch.nn.Sequential(torch.nn.Embedding(ids, 32), torch.nn.Linear(32, ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = TokenLRScheduler(
        optimizer, warmup_tokens=4096, target_tokens=target_tokens
    )  # 2. in tokens

    saved = options.checkpoint / "last.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)  # safe from torch 2.10 on
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        dataset.load_state_dict(
            state["dataset"]
        )  # 3. goes on after the last sample that the weights have seen
    replica = DistributedDataParallel(model)

    batches = (
        dataset if dataset.sample_index < options.samples else []
    )  # one that is done is not trained further
    for step, batch in enumerate(batches, start=1):
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
        record(
            options, rank, dataset, total.item() / dist.get_world_size(), scheduler.get_last_lr()[0]
        )
        if step % options.every == 0 and rank == 0:
            options.checkpoint.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {
                "scheduler": scheduler.state_dict(),
                "dataset": dataset.state_dict(),
            }  # 4. beside the weights
            torch.save(state, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)
        if dataset.sample_index >= options.samples:
            break
    dataset.close()
    dist.destroy_process_group()


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
    parser.add_argument("url", help="grpc://host:port/run, or the path of a mixture file")
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

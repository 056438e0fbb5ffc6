"""A trainer that tells the loss of each source, on any number of ranks.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 2 examples/source_losses.py grpc://127.0.0.1:50051/sample --checkpoint checkpoint

What ``SourceLoss`` needs is marked 1 to 3. The losses stand on the server's page beside the shares, and
``examples/online_mixing.py`` changes the mixture by them while this trains.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from tokenloom import MeanLosses, RemoteDataset, SourceLoss, mean_loss, token_losses
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """Predicts the next id from two: logits of [B, L, vocabulary]."""

    def __init__(self, vocab_size: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.both = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        these = self.embedding(input_ids)
        before = functional.pad(these, (0, 0, 1, 0))[:, :-1]
        logits: torch.Tensor = self.head(
            functional.gelu(self.both(torch.cat((these, before), dim=-1)))
        )
        return logits


def main(options: argparse.Namespace) -> None:
    """One rank."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    dataset = RemoteDataset(options.url, options.batch_size, resume="fresh")  # a loaded state wins
    source_loss = SourceLoss(dataset)  # 1. sums on the device that losses come on
    model = Model(vocab_size=dataset.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    saved = options.checkpoint / "last.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)  # safe from torch 2.10 on
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        dataset.load_state_dict(state["dataset"])
    replica = DistributedDataParallel(model)

    batches = (
        dataset if dataset.sample_index < options.samples else []
    )  # one that is done is not trained further
    for step, batch in enumerate(batches, start=1):
        logits = replica(batch["input_ids"])
        losses = token_losses(logits, batch["labels"], shifted=dataset.labels == "shifted")
        source_loss.add(losses, batch)  # 2. waits for nothing
        optimizer.zero_grad()
        mean_loss(losses, batch, dataset).backward()
        optimizer.step()

        if step % options.every == 0:
            # 3. on every rank, for it is a collective; all get the same numbers, and rank 0 tells the server
            means = source_loss.log(step=step, learning_rate=optimizer.param_groups[0]["lr"])
            record(options, rank, dataset, means)
            if rank == 0:
                options.checkpoint.mkdir(parents=True, exist_ok=True)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"dataset": dataset.state_dict()}, saved.with_suffix(".part"))
                saved.with_suffix(".part").replace(saved)
        if dataset.sample_index >= options.samples:
            break
    dataset.close()
    dist.destroy_process_group()


def record(
    options: argparse.Namespace, rank: int, dataset: RemoteDataset, means: MeanLosses
) -> None:
    """What was measured, for people and for ``--record``."""
    if rank == 0:
        loss_texts = "  ".join(
            f"{name} {loss:.4f} ({means.tokens[name]})" for name, loss in means.losses.items()
        )
        print(
            f"samples {dataset.sample_index}  tokens {dataset.total_tokens}  {loss_texts}",
            flush=True,
        )
    if options.record:
        line = {"sample_index": dataset.sample_index, "digest": dataset.digest}
        line |= {"losses": means.losses, "tokens": means.tokens, "loss": means.loss}
        with options.record.with_suffix(f".{rank}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="grpc://host:port/run")
    parser.add_argument("--batch-size", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--samples", type=int, default=800, help="of the whole run, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("checkpoint"),
        help="folder to save to and to resume from",
    )
    parser.add_argument(
        "--every", type=int, default=5, help="steps between two logs, and two checkpoints"
    )
    parser.add_argument(
        "--record", type=Path, help="file for a JSON line per log; each rank's ends with its number"
    )
    main(parser.parse_args())

"""Trains a small GPT from a Tokenloom run: the trainer of the demonstration, and an example to copy from.

    torchrun --nproc-per-node 2 -m tokenloom_tools.demo.trainer grpc://127.0.0.1:50051/demo --tokens 1_000_000

What Tokenloom needs of a trainer is marked 1 to 5; everything else is ordinary PyTorch. The receipts
are for the demonstration's proof: a trainer of yours has none.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenloom import RemoteDataset, TokenLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody reads
from torch.nn.parallel import DistributedDataParallel

from tokenloom_tools.checkpoint.file import require_safe_torch
from tokenloom_tools.demo.plan import LEARNING_RATE, LR_FLOOR
from tokenloom_tools.demo.receipts import ReceiptWriter, received


class GPT(nn.Module):
    """1.9 M parameters with a vocabulary of 8192: small enough to learn something on two CPU cores."""

    def __init__(
        self,
        vocab_size: int,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        longest_sequence: int = 512,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(longest_sequence, width)
        block = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of predicting each label from what stands before it; labels of −100 do not count."""
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions.weight[:length]
        x = self.blocks(x, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True)
        logits = F.linear(x[:, :-1], self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


log = logging.getLogger("trainer")


def train(
    url: str,
    *,
    batch_size: int,
    tokens: int,
    warmup_tokens: int,
    vocab_size: int,
    checkpoint: Path | None,
    checkpoint_every: int,
    resume: bool,
    receipts: Path,
    rendezvous: str,
    pause: float,
) -> None:
    """One rank."""
    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(0)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)

    # 1. The dataset. Rank and world size come from torch.distributed.
    dataset = RemoteDataset(url, batch_size=batch_size)
    model = GPT(vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    # 2. The schedule, in tokens: it does not depend on the batch size or on the number of ranks.
    scheduler = TokenLRScheduler(
        optimizer, warmup_tokens=warmup_tokens, target_tokens=tokens, min_lr_ratio=LR_FLOOR
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataset": dataset}
    if resume and checkpoint:
        load(checkpoint, parts)
        log.info("loaded %s: goes on at sample %d", checkpoint, dataset.sample_index)
    replica = DistributedDataParallel(model) if world_size > 1 else model

    with dataset, ReceiptWriter(receipts, rank) as writer:
        for number, batch in enumerate(dataset, start=1):
            loss: torch.Tensor = replica(batch["input_ids"], batch["labels"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # 3. The clock: the tokens of the whole run, the same on each rank.
            scheduler.step(batch["total_tokens"])
            optimizer.step()

            samples, step = received(
                batch, dataset, number, loss.item(), float(scheduler.get_last_lr()[0])
            )
            writer.write(samples, step)
            log.info(
                "step %d  tokens %d  loss %.3f  lr %.3e",
                number,
                step.total_tokens,
                step.loss,
                step.lr,
            )
            if checkpoint and checkpoint_every and number % checkpoint_every == 0 and rank == 0:
                save(checkpoint, parts)
                log.info("saved %s at sample %d", checkpoint, dataset.sample_index)
            if dataset.total_tokens >= tokens:
                break
            time.sleep(pause)
        else:
            log.info("the data ended: %s", dataset.end_reason)
    if world_size > 1:
        dist.destroy_process_group()


def save(path: Path, parts: Mapping[str, Any]) -> None:
    """4. The state of the data lies in the checkpoint, beside the weights. It needs no network."""
    part = path.with_name(path.name + ".part")
    torch.save({name: each.state_dict() for name, each in parts.items()}, part)
    part.replace(path)


def load(path: Path, parts: Mapping[str, Any]) -> None:
    """5. And comes back from it, whatever the new number of ranks or batch size."""
    require_safe_torch(torch.__version__)
    state = torch.load(path, weights_only=True)
    for name, each in parts.items():
        each.load_state_dict(state[name])


def main(arguments: Sequence[str]) -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenloom_tools.demo.trainer", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", help="grpc://host:port/run")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and step")
    parser.add_argument(
        "--tokens", type=int, required=True, help="tokens of the whole run to train on"
    )
    parser.add_argument("--warmup-tokens", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to resume from")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0 saves none")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--receipts", type=Path, default=Path("receipts"), help="folder for what was received"
    )
    parser.add_argument(
        "--rendezvous", default="env://", help="how ranks meet: torch.distributed's init_method"
    )
    parser.add_argument(
        "--pause", type=float, default=0, help="seconds after each step, for whoever watches"
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    train(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])

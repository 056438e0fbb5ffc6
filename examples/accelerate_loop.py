"""A loop of one's own with Accelerate, killed and resumed at will, on any number of processes.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 2 examples/accelerate_loop.py grpc://127.0.0.1:50051/sample --checkpoint checkpoint

What Tokenloom needs is marked 1 to 4; everything else is an ordinary script for Accelerate.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from tokenloom import RemoteDataset, TokenLRScheduler, mean_loss, token_losses
from tokenloom.integrations.accelerate import TokenloomLoader


def main(options: argparse.Namespace) -> None:
    """One process."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)

    # 1. After the Accelerator. Without a checkpoint from the beginning; a loaded state wins.
    dataset = RemoteDataset(options.url, options.batch_size // options.accumulate, resume="fresh")
    batches = TokenloomLoader(
        accelerator, dataset
    )  # 2. in place of a DataLoader, and never through prepare()
    # The run says how many ids and how long its samples are.
    ids, target_tokens = dataset.vocab_size, options.samples * dataset.sequence_length
    model = torch.nn.Sequential(torch.nn.Embedding(ids, 32), torch.nn.Linear(32, ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = TokenLRScheduler(optimizer, warmup_tokens=4096, target_tokens=target_tokens)
    accelerator.register_for_checkpointing(scheduler)
    model, optimizer = accelerator.prepare(model, optimizer)

    last = newest(options.checkpoint)
    if last:
        accelerator.load_state(
            last
        )  # 3. the data go on after the last sample that the weights have seen

    steps, total = 0, torch.zeros(())
    for batch in batches:
        with accelerator.accumulate(model):
            loss = mean_loss(
                token_losses(model(batch["input_ids"]), batch["labels"], shifted=False),
                batch,
                dataset,
            )
            accelerator.backward(loss)
            scheduler.step(batch["total_tokens"])  # 4. in tokens
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / options.accumulate
        if not accelerator.sync_gradients:
            continue
        steps += 1
        record(
            options,
            accelerator,
            dataset,
            accelerator.reduce(total, "mean").item(),
            scheduler.get_last_lr()[0],
        )
        total.zero_()
        if steps % options.every == 0:
            save(accelerator, options.checkpoint / str(dataset.sample_index))
        if dataset.sample_index >= options.samples:
            break
    dataset.close()
    accelerator.end_training()


def newest(folder: Path) -> Path | None:
    """The last checkpoint that was saved whole."""
    checkpoints = [path for path in folder.glob("*") if path.name.isdigit()]
    return max(checkpoints, key=lambda path: int(path.name), default=None)


def save(accelerator: Accelerator, folder: Path) -> None:
    """A checkpoint counts once it has its name, and each replaces the one before."""
    part = folder.with_suffix(".part")
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(part)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        before = newest(folder.parent)
        part.rename(folder)
        if before:
            shutil.rmtree(before)


def record(
    options: argparse.Namespace,
    accelerator: Accelerator,
    dataset: RemoteDataset,
    loss: float,
    lr: float,
) -> None:
    """What was trained, for people and for ``--record``."""
    accelerator.print(
        f"samples {dataset.sample_index}  tokens {dataset.total_tokens}  loss {loss:.4f}  lr {lr:.2e}"
    )
    if options.record and accelerator.is_main_process:
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
    parser.add_argument(
        "--batch-size", type=int, default=4, help="samples per process and optimiser step"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="batches that these come in")
    parser.add_argument(
        "--samples", type=int, default=800, help="of the whole run, over all processes"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("checkpoint"),
        help="folder to save to and to resume from",
    )
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--record", type=Path, help="file for a JSON line per step")
    main(parser.parse_args())

"""Lightning's Trainer, killed and resumed at will, on any number of processes.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 2 examples/lightning_fit.py grpc://127.0.0.1:50051/sample --checkpoint checkpoint

What Tokenloom needs is marked 1 to 4; everything else is ordinary Lightning.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenloom import TokenLRScheduler, mean_loss, token_losses
from tokenloom.integrations.lightning import TokenloomDataModule, TokenLRModule


class Model(TokenLRModule):  # 1. a LightningModule whose LR follows the tokens
    """Predicts each id from the one before it."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:  # the run says how many ids there are
            ids = self.trainer.datamodule.dataset.vocab_size  # type: ignore[attr-defined]
            self.model = torch.nn.Sequential(torch.nn.Embedding(ids, 32), torch.nn.Linear(32, ids))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        assert self.model is not None
        losses = token_losses(self.model(batch["input_ids"]), batch["labels"], shifted=False)
        # Lightning divides by accumulate_grad_batches, and the loss is a part of the mean over all of these already.
        return mean_loss(losses, batch, self.trainer) * self.trainer.accumulate_grad_batches

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        target = self.samples * self.trainer.datamodule.dataset.sequence_length  # type: ignore[attr-defined]
        scheduler = TokenLRScheduler(
            optimizer, warmup_tokens=4096, target_tokens=target
        )  # 2. in tokens
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Record(Callback):
    """What was trained, for people and for ``--record``; and the end, in samples of the whole run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean").item()
        lr = pl_module.lr_schedulers().get_last_lr()[0]
        data = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            print(
                f"samples {data.sample_index}  tokens {data.total_tokens}  loss {loss:.4f}  lr {lr:.2e}",
                flush=True,
            )
            if self.options.record:
                line = {
                    "sample_index": data.sample_index,
                    "digest": data.digest,
                    "loss": loss,
                    "lr": lr,
                }
                with self.options.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        if data.sample_index >= self.options.samples:
            trainer.should_stop = True


def main(options: argparse.Namespace) -> None:
    """One process."""
    torch.manual_seed(0)
    # 3. Ranks, state and end come with it. Without a checkpoint from the beginning; a loaded state wins.
    data = TokenloomDataModule(options.url, options.batch_size, resume="fresh")
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=1,
        callbacks=[
            Record(options),
            ModelCheckpoint(
                options.checkpoint, save_last=True, save_top_k=0, every_n_train_steps=options.every
            ),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Model(options.samples), datamodule=data, ckpt_path="last"
    )  # 4. the data go on with the weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="grpc://host:port/run")
    parser.add_argument("--batch-size", type=int, default=4, help="samples per process and step")
    parser.add_argument(
        "--samples", type=int, default=800, help="of the whole run, over all processes"
    )
    parser.add_argument("--accelerator", default="auto", help="as Lightning's Trainer takes it")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("checkpoint"),
        help="folder to save to and to resume from",
    )
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--record", type=Path, help="file for a JSON line per step")
    main(parser.parse_args())

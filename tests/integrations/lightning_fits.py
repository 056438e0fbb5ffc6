"""A model, a callback and a Trainer for the tests of Lightning, which import this themselves: it takes seconds."""

from __future__ import annotations

import json
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenloom import TokenLRScheduler
from tokenloom.integrations.lightning import TokenLRModule

ROWS = 24
LENGTH = 16


class Model(TokenLRModule):
    """A table of logits; notes what it was trained on, and at which rate."""

    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        self.table = torch.nn.Embedding(258, 258)
        self.interval = interval
        self.batch_size = 0
        self.trained: list[int] = []
        self.rates: list[float] = []
        self.labels: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.trained += batch["sample_ids"].tolist()
        self.labels.append(batch["global_label_tokens"])
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return torch.nn.functional.cross_entropy(
            self.table(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = TokenLRScheduler(optimizer, warmup_tokens=0, target_tokens=ROWS * LENGTH)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.interval},
        }


class States(Callback):
    """What a checkpoint made behind each batch would hold."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        self.indices.append(index_of(data.state_dict()))
        assert self.indices[-1] == data.sample_index


def index_of(state: dict[str, Any]) -> int:
    found: int = json.loads(state["tokenloom"])["sample_index"]
    return found


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(
            isinstance(callback, ModelCheckpoint) for callback in callbacks
        ),
        "max_epochs": 1,
    }
    return Trainer(callbacks=list(callbacks), **(quiet | options))

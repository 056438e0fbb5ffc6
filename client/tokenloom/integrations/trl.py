"""TRL's ``SFTTrainer`` on a run's batches: rows with loss masks, or packed documents.

    dataset = RemoteDataset("grpc://host:50051/run", args.per_device_train_batch_size, columns=["position_ids"])
    trainer = TokenloomSFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)

Reading, tokenising, chat templates, masks and packing are the mixture file's business here; SFTTrainer's own loss,
metrics and checkpoints stay as they are.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from tokenloom.datasets.training import TrainingDataset
from tokenloom.integrations.transformers import TokenloomMixin


class TokenloomSFTTrainer(TokenloomMixin, SFTTrainer):
    """``trl.SFTTrainer`` on a ``RemoteDataset``: see ``TokenloomMixin``.

    SFTTrainer counts tokens by the column ``position_ids`` or ``attention_mask``. With ``position_ids`` alone, none of
    the documents that are packed into a sample sees another; with ``attention_mask`` they are one to the model.

    ``args`` is an ``SFTConfig``. Raises ``ValueError`` for what of it would prepare data: ``packing``,
    ``padding_free``, ``completion_only_loss`` and ``assistant_only_loss``.
    """

    def __init__(
        self, model: Any, args: SFTConfig, *, train_dataset: TrainingDataset, **named: Any
    ) -> None:
        if not isinstance(train_dataset, TrainingDataset):
            raise ValueError(
                f"train_dataset must be a tokenloom.RemoteDataset; got a {type(train_dataset).__name__}"
            )
        for name, instead in (
            ("packing", "packing"),
            ("padding_free", "packing"),
            ("completion_only_loss", "loss masks"),
            ("assistant_only_loss", "loss masks"),
        ):
            if getattr(args, name):
                raise ValueError(
                    f"{name}=True is not for a RemoteDataset: the mixture file says {instead}. Leave it out"
                )
        # SFTTrainer takes nothing but datasets, and looks at a sample's columns; this one stands there meanwhile.
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        stand_in = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
        super().__init__(model, args, train_dataset=stand_in, **named)
        self.train_dataset = train_dataset

"""Hugging Face's Trainer, killed and resumed at will, on any number of processes.

    tokenloom serve examples/compose/mixture.yaml
    torchrun --nproc-per-node 2 examples/hf_trainer.py grpc://127.0.0.1:50051/sample --checkpoint checkpoint

What Tokenloom needs is marked 1 to 3; everything else is an ordinary script for Trainer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenloom import RemoteDataset, TokenLRScheduler
from tokenloom.integrations.transformers import TokenloomTrainer, last_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed


def main(options: argparse.Namespace) -> None:
    """One process."""
    set_seed(0)
    args = TrainingArguments(
        output_dir=str(options.checkpoint),
        per_device_train_batch_size=options.batch_size // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=options.every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    # 1. After TrainingArguments. Without a checkpoint from the beginning; a loaded state wins.
    dataset = RemoteDataset(options.url, args.per_device_train_batch_size, resume="fresh")
    tokens = options.samples * dataset.sequence_length

    config = {"vocab_size": dataset.vocab_size, "hidden_size": 32, "intermediate_size": 64}
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": dataset.sequence_length,
    }
    trainer = TokenloomTrainer(  # 2. in place of Trainer
        model=LlamaForCausalLM(LlamaConfig(**config)),
        args=args,
        train_dataset=dataset,
        target_tokens=tokens,
        token_lr=lambda optimizer: TokenLRScheduler(
            optimizer, warmup_tokens=4096, target_tokens=tokens
        ),
        callbacks=[Record(options.record, dataset)],
    )
    trainer.train(
        resume_from_checkpoint=last_checkpoint(args.output_dir)
    )  # 3. the last that was saved whole
    dataset.close()
    trainer.accelerator.end_training()


class Record(TrainerCallback):
    """What was trained, for ``--record``."""

    def __init__(self, path: Path | None, dataset: RemoteDataset) -> None:
        self.path = path
        self.dataset = dataset

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """A JSON line for each optimiser step."""
        if self.path and state.is_world_process_zero and "loss" in logs:
            line = {"sample_index": self.dataset.sample_index, "digest": self.dataset.digest}
            line |= {"loss": logs["loss"], "lr": logs["learning_rate"]}
            with self.path.open("a", encoding="utf-8") as file:
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

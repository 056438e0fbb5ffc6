"""TRL's SFTTrainer on conversations with loss masks, killed and resumed at will.

    tokenloom serve examples/sft/mixture.yaml
    torchrun --nproc-per-node 2 examples/hf_sft.py grpc://127.0.0.1:50051/sft --checkpoint checkpoint

What Tokenloom needs is marked 1 to 3; everything else is an ordinary script for SFTTrainer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenloom import RemoteDataset
from tokenloom.integrations.transformers import last_checkpoint
from tokenloom.integrations.trl import TokenloomSFTTrainer
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from trl import SFTConfig


def main(options: argparse.Namespace) -> None:
    """One process."""
    set_seed(0)
    args = SFTConfig(
        output_dir=str(options.checkpoint),
        per_device_train_batch_size=options.batch_size,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=options.every,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    # 1. After SFTConfig. Without a checkpoint from the beginning; a loaded state wins.
    dataset = RemoteDataset(
        options.url, args.per_device_train_batch_size, columns=["attention_mask"], resume="fresh"
    )

    config = {
        "vocab_size": dataset.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "attention_dropout": 0.1,
    }
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": dataset.sequence_length,
    }
    trainer = TokenloomSFTTrainer(  # 2. in place of SFTTrainer
        LlamaForCausalLM(LlamaConfig(**config)),
        args,
        train_dataset=dataset,
        processing_class=ByT5Tokenizer(),  # your model's own; the server has tokenised already
        target_tokens=options.samples * dataset.sequence_length,
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
    parser.add_argument("--batch-size", type=int, default=4, help="samples per process and step")
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

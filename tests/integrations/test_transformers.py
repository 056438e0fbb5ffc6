"""Hugging Face Trainer: the example, killed and resumed."""

from __future__ import annotations

from pathlib import Path

import yaml
from support.killed import EXAMPLES, kill_and_resume, two_runs
from support.scripts import Forks


def test_a_trainer_that_is_killed_goes_on_as_if_nothing_had_been(transformers_forks: Forks, tmp_path: Path) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(transformers_forks, EXAMPLES / "hf_trainer.py", urls, tmp_path, resumed_world_sizes=[2, 1, 4])


def test_an_sft_trainer_goes_on_with_masks_and_dropout_as_if_nothing_had_been(
    transformers_forks: Forks, tmp_path: Path
) -> None:
    mixture = yaml.safe_load((EXAMPLES / "sft" / "mixture.yaml").read_text(encoding="utf-8"))
    (source,) = mixture["mixture"]["children"]
    source["source"] = f"jsonl:{EXAMPLES.resolve()}/sft/chats.jsonl:ids"
    with two_runs(tmp_path, packing=mixture["packing"], mixture=mixture["mixture"]) as urls:
        kill_and_resume(transformers_forks, EXAMPLES / "hf_sft.py", urls, tmp_path)

"""Hugging Face Trainer and SFTTrainer: the examples, killed and resumed, and a Trainer in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.forks import Forks
from support.killed import EXAMPLES, FORM, kill_and_resume, two_runs
from tokenloom import (
    EvaluationDataset,
    LaunchOptions,
    LocalDataset,
    RemoteDataset,
    TokenBudget,
    TokenLRScheduler,
    TokenProgress,
)
from tokenloom.integrations.transformers import TokenloomMixin, TokenloomTrainer, last_checkpoint
from tokenloom.integrations.trl import TokenloomSFTTrainer
from torch.nn.functional import cross_entropy
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig

LENGTH = int(FORM["sequence_length"])
#: Of the mixture of ``examples/sft``, in two epochs.
SAMPLES = 32


def test_a_trainer_that_is_killed_goes_on_as_if_nothing_had_been(
    transformers_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            transformers_forks,
            EXAMPLES / "hf_trainer.py",
            urls,
            tmp_path,
            arguments=["--accumulate", 2],
        )


def test_an_sft_trainer_goes_on_with_masks_and_dropout_as_if_nothing_had_been(
    transformers_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path, **conversations(epochs=float("inf"))) as urls:
        kill_and_resume(transformers_forks, EXAMPLES / "hf_sft.py", urls, tmp_path)


def conversations(epochs: float) -> dict[str, Any]:
    """The mixture of ``examples/sft``: rows with loss masks, padded."""
    mixture = yaml.safe_load((EXAMPLES / "sft" / "mixture.yaml").read_text(encoding="utf-8"))
    (source,) = mixture["mixture"]["children"]
    source |= {"source": f"jsonl:{EXAMPLES.resolve()}/sft/chats.jsonl:ids", "epochs": epochs}
    return {"packing": mixture["packing"], "mixture": mixture["mixture"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of two epochs of the conversations, each test's from the beginning, and a stream of theirs."""
    questions = {"streams": {"questions": {"mixture": conversations(epochs=1)["mixture"]}}}
    with two_runs(tmp_path_factory.mktemp("runs"), **conversations(epochs=2), **questions) as urls:
        yield urls[0]


@pytest.fixture
def dataset(url: str) -> Iterator[RemoteDataset]:
    """Four samples a batch."""
    with RemoteDataset(url, 4, resume="fresh", launch=LaunchOptions(takeover=True)) as found:
        yield found


def arguments(
    folder: Path, form: type[TrainingArguments] = TrainingArguments, **named: Any
) -> TrainingArguments:
    common = {
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
    }
    return form(str(folder), use_cpu=True, disable_tqdm=True, **common | named)


def model() -> LlamaForCausalLM:
    set_seed(0)
    config = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(**config, num_attention_heads=2, max_position_embeddings=LENGTH)
    )


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """The log of each step."""
    return [line for line in trainer.state.log_history if "loss" in line]


def test_losses_are_those_of_trainers_own_count_of_labels(
    dataset: RemoteDataset, tmp_path: Path
) -> None:
    counts = []

    class Compared(TokenloomTrainer):
        def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
            found = super()._get_num_items_in_batch(batch_samples, device)
            counts.append(
                (found.item(), Trainer._get_num_items_in_batch(self, batch_samples, device).item())
            )
            return found

    args = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=3, save_strategy="no")
    trainer = Compared(model(), args, train_dataset=dataset)
    own = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Trainer, "_get_num_items_in_batch", _remembered(Trainer._get_num_items_in_batch, own)
        )
        trainer.train()
    assert len(counts) == 3
    assert [found for found, _ in counts] == [expected for _, expected in counts]
    assert len({found for found, _ in counts}) > 1, (
        "rows of these lengths have other numbers of labels"
    )
    assert len(own) == 3, "Trainer counted labels although they came with the batches"


def _remembered(function: Any, calls: list[int]) -> Any:
    def remembered(self: Any, batch_samples: list[Any], device: Any) -> Any:
        calls.append(len(batch_samples))
        return function(self, batch_samples, device)

    return remembered


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A mixture file whose samples hold several documents each."""
    rows = [json.dumps({"text": f"{row} " * (1 + row % 9)}) for row in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    sources = {"policy": "least_consumed", "children": [{"source": "jsonl:rows.jsonl:text"}]}
    fields = {"run": "packed", "seed": 0, "tokenizer": "bytes", "sequence_length": LENGTH}
    path = tmp_path / "mixture.yaml"
    path.write_text(
        yaml.safe_dump({**fields, "packing": "best_fit", "mixture": sources}), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("of", ["transformers", "trl"])
def test_with_position_ids_no_document_of_a_sample_sees_another(
    of: str, packed: Path, tmp_path: Path
) -> None:
    with LocalDataset(packed, 4, columns=["document_ids"], resume="fresh") as dataset:
        batch = next(iter(dataset))
    alone, summed = model(), 0.0
    for ids, labels, documents in zip(
        batch["input_ids"], batch["labels"], batch["document_ids"], strict=True
    ):
        logits = torch.cat(
            [
                alone(input_ids=ids[documents == own][None]).logits[0]
                for own in documents.unique_consecutive()
            ]
        )
        summed += cross_entropy(logits[:-1], labels[1:], reduction="sum").item()
    assert int(batch["document_ids"].max()) > 0
    options: dict[str, Any] = {"max_steps": 1, "save_strategy": "no"}
    with LocalDataset(packed, 4, columns=["position_ids"], resume="fresh") as dataset:
        trainer: Trainer
        if of == "trl":
            args: Any = arguments(
                tmp_path, SFTConfig, bf16=False, gradient_checkpointing=None, **options
            )
            named = {"train_dataset": dataset, "processing_class": ByT5Tokenizer()}
            trainer = TokenloomSFTTrainer(model(), args, **named)
        else:
            trainer = TokenloomTrainer(
                model(), arguments(tmp_path, **options), train_dataset=dataset
            )
        trained = trainer.train().training_loss
    assert trained == pytest.approx(summed / batch["global_label_tokens"], rel=1e-5)


def test_a_training_ends_with_its_data_and_saves_what_it_has(
    dataset: RemoteDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=3, save_steps=100)
    trainer = TokenloomTrainer(model(), args, train_dataset=dataset, target_tokens=1_000_000)
    with caplog.at_level(logging.WARNING, "tokenloom"):
        result = trainer.train()
    assert result.global_step == 2  # 32 samples are 8 batches
    assert args.max_steps == -1, "these are the caller's"
    assert "ended: every source is exhausted" in caplog.text
    assert "(2 of 3 batches of a step were left)" in caplog.text
    saved = json.loads((tmp_path / "checkpoint-2" / "tokenloom.json").read_text(encoding="utf-8"))
    assert json.loads(saved["tokenloom"])["sample_index"] == 24, (
        "the batches that were left are not trained on"
    )


class SavesBefore(TrainerCallback):
    """Saves before each optimiser step and behind it, as on SIGTERM (``enable_jit_checkpoint``)."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.saved: list[tuple[int, int]] = []

    def _save(self, state: Any, **_: Any) -> None:
        self.trainer._save_checkpoint(self.trainer.model, trial=None)
        file = (
            Path(self.trainer.args.output_dir)
            / f"checkpoint-{state.global_step}"
            / "tokenloom.json"
        )
        found = json.loads(json.loads(file.read_text(encoding="utf-8"))["tokenloom"])
        self.saved.append((state.global_step, found["sample_index"]))

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._save(state)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._save(state)


def test_a_checkpoint_has_the_data_of_its_weights_whenever_it_is_saved(
    dataset: RemoteDataset, tmp_path: Path
) -> None:
    callback = SavesBefore()
    args = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=2, save_strategy="no")
    callback.trainer = TokenloomTrainer(model(), args, train_dataset=dataset, callbacks=[callback])
    callback.trainer.train()
    assert callback.saved == [(0, 0), (1, 8), (1, 8), (2, 16)]


@pytest.mark.parametrize("part", ["_get_num_items_in_batch", "_save_checkpoint", "_save_rng_state"])
def test_a_trainer_that_passes_by_what_the_mixin_overrides_is_refused(
    part: str, dataset: RemoteDataset, tmp_path: Path
) -> None:
    args = arguments(tmp_path, max_steps=1, save_steps=1)
    trainer = TokenloomTrainer(model(), args, train_dataset=dataset)
    setattr(trainer, part, lambda *_, **__: None)  # as a release that has renamed it

    with pytest.raises(RuntimeError, match=f"Trainer of transformers .* does not call its {part}"):
        trainer.train()


def test_another_trainer_may_save_and_count_by_itself(
    dataset: RemoteDataset, tmp_path: Path
) -> None:
    class SavesAdapters(Trainer):
        def _save_checkpoint(self, *_: Any, **__: Any) -> None:
            """Saves no state of random numbers."""

        def get_batch_samples(self, batches: Any, count: int, device: Any) -> Any:
            return [next(batches) for _ in range(count)], torch.tensor(1, device=device)

    class Mixed(TokenloomMixin, SavesAdapters):
        pass

    Mixed(model(), arguments(tmp_path, max_steps=1, save_steps=1), train_dataset=dataset).train()

    assert (tmp_path / "checkpoint-1" / "tokenloom.json").is_file()


def test_tokens_say_when_it_ends_what_the_rate_is_and_how_far_it_is(
    dataset: RemoteDataset, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = 6 * 4 * LENGTH
    lines: list[str] = []
    budget = TokenBudget(context_length=LENGTH, batch_size=4, dataset_samples=SAMPLES)

    def trainer(dataset: RemoteDataset, until: int = target, **named: Any) -> TokenloomTrainer:
        return TokenloomTrainer(
            model(),
            arguments(tmp_path, learning_rate=1e-3),
            train_dataset=dataset,
            target_tokens=until,
            token_lr=lambda optimizer: TokenLRScheduler(
                optimizer, warmup_tokens=2 * 4 * LENGTH, target_tokens=until
            ),
            **named,
        )

    first = trainer(
        dataset, progress=TokenProgress(budget, every_s=0.0, write=lines.append, bar=False)
    )
    first.train()
    steps = logged(first)
    assert [step["total_tokens"] for step in steps] == [n * 4 * LENGTH for n in range(1, 7)]
    assert [step["total_percent"] for step in steps] == [16.67, 33.33, 50.0, 66.67, 83.33, 100.0]
    assert [step["learning_rate"] for step in steps[:2]] == [0.5e-3, 1e-3]
    assert steps[-1]["learning_rate"] == 0.0
    assert lines[0].startswith("Dataset estimate: steps=8 ")
    assert lines[-1].startswith(
        "Tokens 3.1k, Total 75.0%, Samples 24, Epoch 1, Step 6, Global 6, Loss "
    )

    # A run that is over trains no further; one that is not goes on, in epochs, too.
    dataset.close()
    for checkpoint in (6, 4):
        with RemoteDataset(url, 4, launch=LaunchOptions(takeover=True)) as again:
            other = trainer(again)
            other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{checkpoint}"))
        assert logged(other) == steps
        assert ("nothing is left to train: step 6 of 6, 3072 tokens" in caplog.text) == (
            checkpoint == 6
        )
        caplog.clear()

    # A later end in the script is one of the schedule, too.
    with RemoteDataset(url, 4, launch=LaunchOptions(takeover=True)) as again:
        longer = trainer(again, 8 * 4 * LENGTH)
        longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert [step["learning_rate"] > 0 for step in logged(longer)[6:]] == [True, False]
    assert f"target_tokens: {8 * 4 * LENGTH}, where the checkpoint has {target}" in caplog.text


def test_evaluation_reads_the_same_samples_each_time(
    dataset: RemoteDataset, url: str, tmp_path: Path
) -> None:
    args = arguments(
        tmp_path,
        max_steps=2,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )
    with EvaluationDataset(url, 4, stream="questions", samples=12) as questions:
        trainer = TokenloomTrainer(model(), args, train_dataset=dataset, eval_dataset=questions)
        trainer.train()
        again = trainer.evaluate()
        (found,) = (line for line in trainer.state.log_history[:-1] if "eval_loss" in line)
    assert 5.0 < found["eval_loss"] < 6.0
    assert found["total_tokens"] == 2 * 4 * LENGTH
    assert again["eval_loss"] == found["eval_loss"]


def test_a_checkpoint_that_was_not_saved_to_the_end_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    assert last_checkpoint(tmp_path) is None
    for step, state in ((5, '{"global_step": 5}'), (10, None), (20, '{"global_st')):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state, encoding="utf-8")
    (tmp_path / "checkpoint-30").write_text("a file", encoding="utf-8")
    with caplog.at_level(logging.WARNING, "tokenloom"):
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/checkpoint-20 was not saved to the end and is left out",
        f"{tmp_path}/checkpoint-10 was not saved to the end and is left out",
    ]


def test_a_checkpoint_without_the_state_of_its_data_is_refused(
    dataset: RemoteDataset, tmp_path: Path
) -> None:
    trainer = TokenloomTrainer(
        model(), arguments(tmp_path), train_dataset=dataset, target_tokens=1024
    )
    with pytest.raises(ValueError, match="has no checkpoint that was saved whole"):
        trainer.train(resume_from_checkpoint=True)
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 5}', encoding="utf-8")
    refusals = {
        None: r"is not there: .* or \{\"sample_index\": N\}",
        "[]": "holds a list",
        "{": "is no JSON",
    }
    for text, message in refusals.items():
        if text is not None:
            (folder / "tokenloom.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"tokenloom\.json {message}"):
            trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"dataloader_num_workers": 2}, "dataloader_num_workers=2 is not for a RemoteDataset"),
        (
            {"accelerator_config": {"dispatch_batches": True}},
            "dispatch_batches=True is not for a RemoteDataset",
        ),
        (
            {"accelerator_config": {"split_batches": True}},
            "split_batches=True is not for a RemoteDataset",
        ),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not for a RemoteDataset"),
        (
            {"max_steps": -1, "num_train_epochs": 2},
            r"num_train_epochs=2 does not say how long.*target_tokens=",
        ),
    ],
)
def test_other_ways_to_read_data_are_refused(
    named: dict[str, Any], message: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path, **{"max_steps": 1} | named)
    with pytest.raises(ValueError, match=message):
        TokenloomTrainer(model(), args, train_dataset=RemoteDataset("grpc://127.0.0.1:1/run", 4))


def test_a_dataset_of_other_ranks_batches_or_labels_is_refused(url: str, tmp_path: Path) -> None:
    def train(dataset: Any, **named: Any) -> None:
        TokenloomTrainer(
            model(), arguments(tmp_path, **named), train_dataset=dataset, target_tokens=1024
        ).train()

    def fresh(**named: Any) -> RemoteDataset:
        launch = LaunchOptions(takeover=True, attempt="a" if named else None)
        return RemoteDataset(url, 4, resume="fresh", launch=launch, **named)

    with pytest.raises(
        ValueError, match="the dataset is rank 0 of 2, but Trainer runs on 1 processes"
    ):
        train(fresh(rank=0, world_size=2))
    with (
        fresh() as dataset,
        pytest.raises(ValueError, match=r"per_device_train_batch_size=8 .* batches of 4 samples"),
    ):
        train(dataset, per_device_train_batch_size=8)
    with (
        fresh(accumulate=2) as dataset,
        pytest.raises(ValueError, match=r"accumulate=2.*accumulation_steps=3"),
    ):
        train(dataset, gradient_accumulation_steps=3)
    growing = RemoteDataset(
        url, [(0, 2), (1024, 4)], resume="fresh", launch=LaunchOptions(takeover=True)
    )
    with (
        growing,
        pytest.raises(
            ValueError, match=r"in the midst of a step of .*: give the RemoteDataset accumulate=3"
        ),
    ):
        train(growing, gradient_accumulation_steps=3)
    with pytest.raises(
        ValueError, match=r"must be a tokenloom\.RemoteDataset; got a TensorDataset"
    ):
        train(torch.utils.data.TensorDataset(torch.zeros(2)))
    with pytest.raises(ValueError, match="target_tokens must be at least 1"):
        TokenloomTrainer(model(), arguments(tmp_path), train_dataset=fresh(), target_tokens=0)


def test_labels_that_would_be_shifted_twice_are_refused(tmp_path: Path) -> None:
    with (
        two_runs(tmp_path / "runs", labels="shifted") as urls,
        RemoteDataset(urls[0], 4) as dataset,
    ):
        trainer = TokenloomTrainer(
            model(), arguments(tmp_path), train_dataset=dataset, target_tokens=1024
        )
        with pytest.raises(
            ValueError, match="labels: shifted, but LlamaForCausalLM shifts them itself"
        ):
            trainer.train()


def test_batches_that_grow_with_the_tokens_end_at_the_same_target(url: str, tmp_path: Path) -> None:
    # Optimiser steps of 2 × 2 samples, and from 8 samples on of 2 × 4.
    sizes = [(0, 2), (8 * LENGTH, 4)]
    args = arguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=2
    )
    steps = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        with RemoteDataset(
            url,
            sizes,
            accumulate=2,
            resume=None if resume else "fresh",
            launch=LaunchOptions(takeover=True),
        ) as dataset:
            trainer = TokenloomTrainer(
                model(), args, train_dataset=dataset, target_tokens=24 * LENGTH
            )
            trainer.train(resume_from_checkpoint=resume)
        steps.append(logged(trainer))
        assert trainer.state.max_steps == 4
    assert [step["total_tokens"] for step in steps[0]] == [n * LENGTH for n in (4, 8, 16, 24)]
    assert steps[1] == steps[0]

    # From sample 1 on, where no step of a run from the beginning ends: 4 samples, and 4 more.
    with RemoteDataset(url, 1, resume="fresh", launch=LaunchOptions(takeover=True)) as dataset:
        next(iter(dataset))
        state = dataset.state_dict()
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    with RemoteDataset(url, sizes, accumulate=2, launch=LaunchOptions(takeover=True)) as dataset:
        dataset.load_state_dict(state)
        trainer = TokenloomTrainer(model(), args, train_dataset=dataset, target_tokens=9 * LENGTH)
        trainer.train()
        assert (trainer.state.max_steps, dataset.total_tokens) == (2, 9 * LENGTH)

"""Hugging Face ``Trainer``: a run's batches, their state in each checkpoint, and a learning rate by tokens.

    from tokenloom.integrations.transformers import TokenloomTrainer

    dataset = RemoteDataset("grpc://host:50051/run", args.per_device_train_batch_size)
    trainer = TokenloomTrainer(model, args, train_dataset=dataset, target_tokens=2_000_000_000)
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))

The batches are each rank's own already. So they do not pass through ``accelerator.prepare``, which would deal them out
once more, or read them on one rank only, and reads ahead of what is trained on.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

from tokenloom.batch.layout import Batch
from tokenloom.clock.lr_scheduler import TokenLRScheduler
from tokenloom.clock.tokens import TokenBudget, TokenProgress
from tokenloom.datasets import tensors
from tokenloom.datasets.base import ConnectedDataset
from tokenloom.datasets.training import TrainingDataset, check_accumulate, check_processes

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
    from transformers import TrainerControl, TrainerState, TrainingArguments
else:
    _Trainer = object  # a mixin: the Trainer that it is for comes after it among the bases


# Checkpoints of Hugging Face's ``Trainer`` that have the state of their data: one more file in each folder.


log = logging.getLogger("tokenloom")

#: The file of a checkpoint that holds the state of its data.
STATE_FILE = "tokenloom.json"
#: What Trainer writes last into a checkpoint, once every rank has written its part.
TRAINER_STATE_FILE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in a folder that was saved whole, for ``train(resume_from_checkpoint=…)``; None where there
    is none. One that a job was killed in the midst of is left out."""
    folder = Path(output_dir)
    checkpoints = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _FOLDER.fullmatch(path.name)) and path.is_dir()
    ]
    for _, path in sorted(checkpoints, reverse=True):
        try:
            step_of(path)
            return str(path)
        except (OSError, ValueError, KeyError):
            log.warning("%s was not saved to the end and is left out", path)
    return None


def step_of(checkpoint: Path) -> int:
    """Trainer's number of optimiser steps at a checkpoint that was saved whole."""
    return int(
        json.loads((checkpoint / TRAINER_STATE_FILE).read_text(encoding="utf-8"))["global_step"]
    )


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Before Trainer writes its own files: as long as its last one is missing, the checkpoint does not count as
    whole."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / TRAINER_STATE_FILE).unlink(missing_ok=True)  # of an earlier attempt
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(json.dumps(state), encoding="utf-8")
    part.replace(checkpoint / STATE_FILE)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What ``write_state`` wrote. Raises ``ValueError`` where there is none, or another thing."""
    path = checkpoint / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there: this checkpoint was saved without the state of its data, so where they go on is not "
            f'known. If it is, put it into that file: a dataset\'s state_dict() as JSON, or {{"sample_index": N}}'
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); expected what RemoteDataset.state_dict() gave"
        ) from None
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} holds a {type(state).__name__}; expected what RemoteDataset.state_dict() gave"
        )
    return state


# a mixin: the Trainer that it is for comes after it among the bases


#: What a batch has for the trainer and not for its model.
_NOT_INPUTS = (frozenset(Batch.__annotations__) | {"dataset_id", "bucket"}) - {
    *("input_ids", "labels", "position_ids", "attention_mask"),
}
#: Trainer wants a number of steps when it is made; how many they are is known once the run is joined.
_UNKNOWN_STEPS = 1


class TokenloomMixin(_Trainer):
    """Makes any ``Trainer`` train on a ``RemoteDataset``: ``class MyTrainer(TokenloomMixin, SomeTrainer)``.

    ``train_dataset`` is a ``RemoteDataset`` with this process's rank; make it after ``TrainingArguments``, which start
    the process group. ``target_tokens`` is where the training ends, in tokens of the whole run; ``max_steps`` follows
    from it on any number of processes (where both are given, the first one reached ends the training).

    ``token_lr`` makes a schedule of an optimizer, such as ``lambda optimizer: TokenLRScheduler(optimizer,
    warmup_tokens=…, target_tokens=…)``. Its clock is the batch in training: a step has the rate of the tokens at its
    end, as with ``scheduler.step(batch["total_tokens"])`` before ``optimizer.step()`` in a loop of one's own. A
    ``TokenLRScheduler`` in ``optimizers`` is stepped alike. ``progress`` shows where the run stands, by tokens, with
    the loss and the rate of Trainer's last log.

    Each checkpoint gets ``tokenloom.json``, the dataset's state after the last batch that the weights have seen, and
    ``train(resume_from_checkpoint=…)`` loads it: ``True`` takes the last checkpoint that was saved whole.

    Where batches say how many labels their step has on all ranks, losses are normalised by that, with no all-reduce.
    Logs have ``total_tokens`` and, with a target, ``total_percent``. A ``RemoteDataset`` may be the ``eval_dataset``,
    too. ``data_collator`` is for other datasets only: these batches are whole.

    The training also ends where the data do: whole steps only, with a last checkpoint where ``save_strategy`` is
    ``"steps"``.

    Raises ``ValueError`` for arguments that mean another way to read data (``dataloader_num_workers``,
    ``dispatch_batches``, ``split_batches``, ``auto_find_batch_size``), and where batch size or number of processes are
    not the dataset's.
    """

    lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        target_tokens: int | None = None,
        token_lr: Callable[[Optimizer], TokenLRScheduler] | None = None,
        progress: TokenProgress | None = None,
        **named: Any,
    ) -> None:
        if target_tokens is not None and target_tokens < 1:
            raise ValueError(f"target_tokens must be at least 1; got {target_tokens!r}")
        self._max_steps = -1 if args is None else args.max_steps
        if args is not None:
            _check_arguments(args)
            if args.max_steps <= 0 and target_tokens is not None:
                args.max_steps = _UNKNOWN_STEPS
            elif args.max_steps <= 0 and isinstance(named.get("train_dataset"), ConnectedDataset):
                raise ValueError(
                    f"num_train_epochs={args.num_train_epochs} does not say how long to train, since the mixture file "
                    f"sets epochs: give {type(self).__name__}(…, target_tokens=…), in tokens of the whole run, or "
                    "TrainingArguments(max_steps=…)"
                )
        self._target_tokens = target_tokens
        self._token_lr = token_lr
        self._progress = progress
        self._figures: dict[str, float] = {}
        #: Of the batch in training.
        self._total_tokens: int | None = None
        #: Where the data of the last steps end, by Trainer's number of steps: callbacks save before an optimiser step
        #: and after it.
        self._ends: dict[int, int] = {}
        self._resumed_step = 0
        self._saved_step: int | None = None
        #: Which of Trainer's own parts that are not public it has called (see ``_require``).
        self._called: set[str] = set()
        try:
            super().__init__(model, args, *positional, **named)
        finally:
            if args is not None:
                args.max_steps = (
                    self._max_steps
                )  # the caller's, who may use them for another training
        # Data go on from their own state; Trainer would read all batches again to find its place.
        self.args.ignore_data_skip = True
        self.add_callback(_Flow(self))

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's batches, whole and as the dataset gives them, never a batch ahead. Joins the run."""
        dataset = self._tokenloom_dataset
        check_processes(dataset, self.args.world_size, "Trainer runs on", "TrainingArguments")
        iter(dataset)
        if dataset.labels == "shifted" and self._loss_shifts_labels:
            raise ValueError(
                f"run {dataset.run} has labels: shifted, but {type(self.model).__name__} shifts them itself, "
                "so each would be predicted from one token too far: set labels: same in the mixture file"
            )
        accumulate = self.args.gradient_accumulation_steps
        check_accumulate(dataset, accumulate, "TrainingArguments have gradient_accumulation_steps")
        size: Any = dataset.batch_size  # or a schedule: pairs of total tokens and samples
        if isinstance(size, tuple) and dataset.accumulate != accumulate:
            raise ValueError(
                f"batch_size={list(size)} would change in the midst of a step of gradient_accumulation_steps="
                f"{accumulate}: give the RemoteDataset accumulate={accumulate}, too"
            )
        if size is None or isinstance(size, int):
            size = dataset.facts.batch_size
            if size != self.args.train_batch_size:
                raise ValueError(
                    f"per_device_train_batch_size={self.args.per_device_train_batch_size} (for "
                    f"{max(1, self.args.n_gpu)} devices in this process), but the dataset gives batches of {size} "
                    "samples: pass RemoteDataset(url, args.per_device_train_batch_size), and start one process for "
                    "each device"
                )
        if self._target_tokens is not None:
            steps = self._resumed_step + self._steps_left(size)
            self.args.max_steps = max(
                1, min(steps, self._max_steps) if self._max_steps > 0 else steps
            )
        self._ends = {self._resumed_step: dataset.sample_index}
        return _loader(dataset, lambda batch: batch)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As Trainer's own; of a ``RemoteDataset`` this rank's batches, without what is not for the model."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if isinstance(dataset, ConnectedDataset):
            return _loader(dataset, _inputs)
        loader: DataLoader[Any] = super().get_eval_dataloader(eval_dataset)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """The batches of one optimiser step; none where the training is over."""
        if self._is_over:
            self.control.should_training_stop = True
            log.warning(
                "nothing is left to train: step %d of %d, %d tokens of the run",
                self.state.global_step, self.state.max_steps, self._tokenloom_dataset.total_tokens,
            )  # fmt: skip
            return [], None
        self._called.clear()
        collect = super().get_batch_samples
        batches, items = collect(epoch_iterator, num_batches, device)
        self._require("_get_num_items_in_batch", of=collect)
        if len(batches) < num_batches:
            # Trainer would neither step on some of its batches nor end by itself, nor save what it has.
            self.control.should_training_stop = self.control.should_log = True
            unsaved = self.state.global_step not in (self._resumed_step, self._saved_step)
            self.control.should_save = unsaved and self.args.save_strategy == "steps"
            log.warning(
                "the data of run %s ended: %s (%d of %d batches of a step were left)",
                self._tokenloom_dataset.run, self._tokenloom_dataset.end_reason, len(batches), num_batches,
            )  # fmt: skip
            return [], None
        return batches, items

    def training_step(
        self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any
    ) -> torch.Tensor:
        """Sets the rate by the batch's tokens, and gives the model what is for it."""
        self._total_tokens = inputs["total_tokens"]
        if isinstance(self.lr_scheduler, _ByTokens):
            self.lr_scheduler.step()
        loss: torch.Tensor = super().training_step(model, _inputs(inputs), *rest, **named)
        if self.accelerator.sync_gradients:
            step = self.state.global_step
            self._ends = {step: self._ends[step], step + 1: inputs["sample_index"]}
        if self._progress is not None:
            self._progress.update(inputs, step=self.accelerator.sync_gradients, **self._figures)
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The labels of all batches of a step on all ranks, as the server counted them, where Trainer wants those."""
        self._called.add("_get_num_items_in_batch")
        if (
            batch_samples
            and "global_label_tokens" in batch_samples[0]
            and self.args.average_tokens_across_devices
            and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
            and self._counts_as_server
        ):
            # Of all of the step's batches already, where the dataset knows how many there are.
            counted = batch_samples[:1] if self._tokenloom_dataset.accumulate > 1 else batch_samples
            return torch.tensor(
                sum(batch["global_label_tokens"] for batch in counted), device=device
            )
        return super()._get_num_items_in_batch(batch_samples, device)

    # Learning rate

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """``token_lr``'s where that was given, else Trainer's own."""
        if self.lr_scheduler is None and self._token_lr is not None:
            self.lr_scheduler = self._token_lr(self.optimizer if optimizer is None else optimizer)
            self._created_lr_scheduler = True
        else:
            super().create_scheduler(num_training_steps, optimizer)
        if isinstance(self.lr_scheduler, TokenLRScheduler):
            self.lr_scheduler = _ByTokens(self.lr_scheduler, lambda: self._total_tokens)
        return self.lr_scheduler

    # Checkpoints

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **named: Any
    ) -> Any:
        """As Trainer's; the data go on from the checkpoint, too. ``True`` takes the last whole one."""
        self._total_tokens = None
        self._resumed_step = 0
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint=True, but {self.args.output_dir} has no checkpoint that was saved whole: "
                    "pass last_checkpoint(args.output_dir), which is None there, to begin without one"
                )
        if resume_from_checkpoint:
            folder = Path(resume_from_checkpoint)
            self._resumed_step = step_of(folder)
            self._tokenloom_dataset.load_state_dict(read_state(folder))
        try:
            return super().train(resume_from_checkpoint or None, *rest, **named)
        finally:
            self.args.max_steps = self._max_steps

    def _save_checkpoint(self, model: Any, trial: Any, *rest: Any, **named: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            write_state(
                folder, self._tokenloom_dataset.state_dict(at=self._ends[self.state.global_step])
            )
        self._called.clear()
        save = super()._save_checkpoint
        save(model, trial, *rest, **named)
        if not self.args.save_only_model:
            self._require("_save_rng_state", of=save)
        self._saved_step = self.state.global_step

    def _save_rng_state(self, output_dir: str) -> None:
        self._called.add("_save_rng_state")
        super()._save_rng_state(output_dir)
        # After this, rank 0 writes what makes the checkpoint count as whole, and deletes older ones.
        self.accelerator.wait_for_everyone()

    # Logs

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        """Adds ``total_tokens`` of the whole run and, with a target, ``total_percent`` of it."""
        if self._total_tokens is not None:
            logs["total_tokens"] = self._total_tokens
            if self._target_tokens is not None:
                logs["total_percent"] = round(100.0 * self._total_tokens / self._target_tokens, 2)
        if "loss" in logs:
            self._figures = {"loss": logs["loss"], "lr": logs["learning_rate"]}
        super().log(logs, *rest, **named)

    def _require(self, part: str, of: Callable[..., Any] | None = None) -> None:
        """Raises ``RuntimeError`` where Trainer has not called a part of its own that is not public, and that does more
        here: losses or checkpoints would be wrong without a word. ``of``: the method that calls it, if that is
        Trainer's: another trainer's may have no need of it."""
        is_trainers = of is None or of.__module__ == Trainer.__module__
        if is_trainers and part not in self._called:
            raise RuntimeError(
                f"Trainer of transformers {transformers.__version__} does not call its {part}, through which "
                "TokenloomMixin counts labels and saves where the data are; install an older release, or write a loop "
                "with RemoteDataset"
            )

    @property
    def _tokenloom_dataset(self) -> TrainingDataset:
        dataset = self.train_dataset
        if not isinstance(dataset, TrainingDataset):
            raise ValueError(
                f"train_dataset must be a tokenloom.RemoteDataset; got a {type(dataset).__name__}"
            )
        return dataset

    def _steps_left(self, size: Any) -> int:
        """Optimiser steps from here to the target."""
        assert self._target_tokens is not None
        dataset, length = self._tokenloom_dataset, self._tokenloom_dataset.sequence_length
        here = dataset.total_tokens
        samples = -(-(self._target_tokens - here) // length)
        if samples <= 0:
            return 0
        # Steps are counted from here, which may be in the middle of what would be a step on other ranks.
        sizes = [(0, size)] if isinstance(size, int) else size
        later = [(tokens - here, own) for tokens, own in sizes if tokens > here]
        budget = TokenBudget(
            context_length=length,
            batch_size=[(0, sizes[-1 - len(later)][1]), *later],
            world_size=dataset.world_size,
            accumulate=self.args.gradient_accumulation_steps,
            dataset_samples=samples,
        )
        return budget.target_steps

    @property
    def _counts_as_server(self) -> bool:
        """Whether the model's labels are those that the server counts: all, and where it shifts them, all but the first
        of each sample."""
        dataset = self._tokenloom_dataset
        return not dataset.facts.rows and (dataset.labels == "shifted") != self._loss_shifts_labels

    @property
    def _share(self) -> float:
        """How much of the training is over, whatever the steps were before a resume."""
        if self._target_tokens is None:
            return float(self.state.global_step / self.state.max_steps)
        return min(1.0, self._tokenloom_dataset.total_tokens / self._target_tokens)

    @property
    def _is_over(self) -> bool:
        return self.state.global_step >= self.state.max_steps or (
            self._target_tokens is not None and self._share >= 1
        )


class TokenloomTrainer(TokenloomMixin, Trainer):
    """``transformers.Trainer`` on a ``RemoteDataset``: see ``TokenloomMixin``."""


def _check_arguments(args: TrainingArguments) -> None:
    """Refuses what means another way to read data."""
    reads = "each process reads its own batches, which are fetched in the background already"
    for name, value, wanted, why in (
        ("dataloader_num_workers", args.dataloader_num_workers, 0, reads),
        (
            "accelerator_config.dispatch_batches",
            bool(args.accelerator_config.dispatch_batches),
            False,
            reads,
        ),
        (
            "accelerator_config.split_batches",
            bool(args.accelerator_config.split_batches),
            False,
            reads,
        ),
        (
            "auto_find_batch_size",
            args.auto_find_batch_size,
            False,
            "the batch size is the dataset's",
        ),
    ):
        if value != wanted:
            raise ValueError(
                f"{name}={value!r} is not for a RemoteDataset: {why}. Set it to {wanted!r}"
            )


def _inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What of a batch is for the model."""
    return {name: value for name, value in batch.items() if name not in _NOT_INPUTS}


def _loader(dataset: ConnectedDataset, collate: Callable[[Any], Any]) -> DataLoader[Any]:
    return tensors.loader_of(_Steps(dataset), collate_fn=collate)


class _Steps(IterableDataset[Batch]):
    """A dataset without a length: where a run ends, and what an epoch is, is said by its mixture."""

    def __init__(self, dataset: ConnectedDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.dataset)


class _ByTokens:
    """A ``TokenLRScheduler`` that looks at the clock by itself: Trainer's ``step()`` brings no tokens."""

    def __init__(self, scheduler: TokenLRScheduler, clock: Callable[[], int | None]) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self.get_last_lr = scheduler.get_last_lr
        self.state_dict = scheduler.state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved clock. The schedule stays the script's, as of Trainer's own schedulers, and the log says
        where the checkpoint has another."""
        own = self.scheduler.state_dict()
        schedule = {
            key: own[key] for key in own.keys() & state.keys() - {"total_tokens", "base_lrs"}
        }
        for key in sorted(schedule):
            if schedule[key] != state[key]:
                log.warning("%s: %s, where the checkpoint has %s", key, schedule[key], state[key])
        self.scheduler.load_state_dict({**state, **schedule})

    def step(self) -> None:
        tokens = self._clock()
        if tokens is not None:
            self.scheduler.step(tokens)


class _Flow(TrainerCallback):
    """Ends the training at its target, also where batches grow, and counts its one epoch over resumes."""

    def __init__(self, trainer: TokenloomMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if (progress := self._trainer._progress) is not None:
            progress.load_state_dict({"global_step": state.global_step})
            progress.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if (progress := self._trainer._progress) is not None:
            progress.close()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer._saved_step != state.global_step:
            self._trainer._require("_save_checkpoint")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        state.epoch = self._trainer._share
        if self._trainer._is_over and not control.should_training_stop:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy == "steps"
            control.should_evaluate = control.should_evaluate or args.eval_strategy == "steps"
        return control

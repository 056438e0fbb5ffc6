"""How long a training run is, in tokens, and how many steps that makes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenloom_proto.batch_schedule import BatchSchedule, Sizes

if TYPE_CHECKING:
    from tokenloom.datasets.committed import CommittedDataset

log = logging.getLogger("tokenloom")


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Tokens and steps of a run, from its batch plan, its data, and how many tokens each parameter is to see.

    A sample of ``context_length`` tokens gives ``context_length`` predictions where labels are shifted already
    (``labels: shifted``), and one less where the model shifts them inside the block, as Hugging Face models do: that is
    ``tokens_per_sample``, in which targets are counted here. The run's own clock, ``batch["total_tokens"]``, always
    counts ``context_length`` for a sample, padding included; ``target_total_tokens`` is the target on that clock.

    Raises ``ValueError`` for what makes no sense, by name.
    """

    context_length: int
    """Tokens of a sample: the run's sequence length."""
    batch_size: int | Sizes
    """Samples per rank and step of ``next()``; or pairs (total tokens of the run, samples), as ``RemoteDataset`` takes
    them."""
    world_size: int = 1
    accumulate: int = 1
    """Steps of ``next()`` for each of the optimiser's."""
    shifts_inside: bool = True
    """Whether the model shifts labels inside the block."""
    dataset_samples: int | None = None
    """Samples that the run is given, all epochs together; None where that is not known."""
    ends: bool = True
    """Whether the data end there; otherwise ``dataset_samples`` are those of one epoch of every source."""
    parameters: int = 0
    factor: float = 0.0
    """Tokens to train on for each parameter; 0: all that the dataset has."""

    def __post_init__(self) -> None:
        for name in ("context_length", "world_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)!r}")
        _ = self._schedule  # checked
        if self.tokens_per_sample < 1:
            raise ValueError(
                "context_length must be at least 2 where labels are shifted inside; got 1"
            )
        if self.factor < 0 or self.parameters < 0:
            raise ValueError(
                f"factor and parameters must not be negative; got {self.factor} and {self.parameters}"
            )
        if self.factor and not self.parameters:
            raise ValueError(
                f"factor={self.factor:g} is tokens per parameter, so parameters must be given"
            )
        if not self.factor and (self.dataset_samples is None or not self.ends):
            raise ValueError(
                "factor=0 means the whole dataset, but this one has no end that is known: give a factor (tokens per "
                "parameter) and parameters, or limit the mixture's epochs or max_tokens"
            )

    @classmethod
    def of(
        cls, dataset: CommittedDataset, *, parameters: int = 0, factor: float = 0.0
    ) -> TokenBudget:
        """The budget of a dataset's run, from the server's plan: from the run's beginning to the end of its data,
        whatever is consumed already, so it is the same on every rank and after a resume. Samples that fill no last
        micro-step are not counted where they are dropped.

        ``shifts_inside`` is by the run's ``labels``. Where phases have other sequence lengths, all samples are counted
        at the last one's, and rank 0's log says so: tokens are as near as ever, steps are not. Raises what a
        request to the server raises, and ``ValueError`` where the dataset leaves its batch size to the run: such a run
        has rows in batches from buckets.
        """
        if dataset.batch_size is None:
            raise ValueError("batch_size: a budget needs it; give the RemoteDataset one")
        plan = dataset.plan()
        length = plan["sequence_length"]
        samples = plan["until_sample_index"] - plan["from_sample_index"]
        tokens = plan["until_tokens"] - plan["from_tokens"]
        if not 0 <= tokens - samples * length < length and dataset.rank == 0:
            log.warning(
                "%s: phases have other sequence lengths (%d samples have %d tokens), and the budget counts all samples "
                "at the last one's, %d: its steps are not those that the run will have",
                plan["run"], samples, tokens, length,
            )  # fmt: skip
        data_tokens = plan["until_tokens"] if plan["ends"] else _one_epoch(plan)
        budget = cls(
            context_length=length,
            batch_size=dataset.batch_size,
            world_size=dataset.world_size,
            accumulate=dataset.accumulate,
            shifts_inside=plan["labels"] == "same",
            dataset_samples=None if data_tokens is None else data_tokens // length,
            ends=plan["ends"],
            parameters=parameters,
            factor=factor,
        )
        if budget.dataset_samples is None or not plan["ends"] or plan["last_micro_step"] == "pad":
            return budget
        return replace(
            budget,
            dataset_samples=budget.dataset_samples - budget._divided(budget.dataset_samples)[2],
        )

    @property
    def _schedule(self) -> BatchSchedule:
        sizes = [(0, self.batch_size)] if isinstance(self.batch_size, int) else self.batch_size
        return BatchSchedule.read(sizes, self.accumulate)

    @property
    def tokens_per_sample(self) -> int:
        """Predictions that a full sample gives."""
        return self.context_length - self.shifts_inside

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimiser step over all ranks; after the last change, where the batch size has a schedule."""
        return self._schedule.sizes[-1][1] * self.world_size * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Predictions of an optimiser step; after the last change, where the batch size has a schedule."""
        return self.samples_per_step * self.tokens_per_sample

    @property
    def dataset_tokens(self) -> int | None:
        """Predictions that the data give; of one epoch of every source where they never end."""
        return (
            None if self.dataset_samples is None else self.dataset_samples * self.tokens_per_sample
        )

    @property
    def dataset_steps(self) -> int | None:
        """Optimiser steps that the data give; the last may have fewer micro-steps than ``accumulate``."""
        return None if self.dataset_samples is None else self._steps_to(self.dataset_samples)

    @property
    def target_tokens(self) -> int:
        """Predictions to train on: ``factor`` × ``parameters``, or the whole dataset."""
        if self.factor:
            return round(self.factor * self.parameters)
        assert self.dataset_tokens is not None
        return self.dataset_tokens

    @property
    def target_samples(self) -> int:
        """Samples that give so many."""
        return -(-self.target_tokens // self.tokens_per_sample)

    @property
    def target_total_tokens(self) -> int:
        """The target on the clock of ``batch["total_tokens"]``: what ``TokenLRScheduler`` takes."""
        return self.target_samples * self.context_length

    @property
    def target_steps(self) -> int:
        """Optimiser steps that reach the target."""
        return self._steps_to(self.target_samples)

    @property
    def target_epochs(self) -> float | None:
        """How often the target goes through the data; None where nobody knows how much they are."""
        return self.target_tokens / self.dataset_tokens if self.dataset_tokens else None

    def steps(self, samples: int) -> tuple[int, int]:
        """Whole optimiser steps in the first so many samples of the run, and how many samples are over.

        A step has the batch size that holds where it begins.
        """
        return self._divided(samples)[:2]

    def _steps_to(self, samples: int) -> int:
        whole, rest = self.steps(samples)
        return whole + bool(rest)

    def _divided(self, samples: int) -> tuple[int, int, int]:
        """As ``steps``, with those of the samples over that are a part of a micro-step."""
        starts = [
            *self._schedule.starts(sample_tokens=self.context_length, world_size=self.world_size)
        ]
        ends = [begin for begin, _ in starts[1:] if begin < samples] + [samples]
        steps = rest = size = 0
        for (begin, size), end in zip(starts, ends, strict=False):
            whole, rest = divmod(end - begin, size * self.world_size * self.accumulate)
            steps += whole
        return steps, rest, rest % (size * self.world_size)

    def lines(self) -> list[str]:
        """The two lines with which a log begins."""
        unknown = "unknown"
        tokens, steps, epochs = self.dataset_tokens, self.dataset_steps, self.target_epochs
        estimate = (
            f"Dataset estimate: steps={steps if steps is not None else unknown} "
            f"tokens={tokens if tokens is not None else unknown} tokens_per_step={self.tokens_per_step}"
        )
        if not self.ends:
            estimate += " (one epoch of every source; the data never end)"
        target = (
            f"Target:          epochs={f'{epochs:.2f}' if epochs is not None else unknown} "
            f"target_steps={self.target_steps} target_tokens={self.target_tokens} (factor {self.factor:g})"
        )
        return [estimate, target]


def _one_epoch(plan: Mapping[str, Any]) -> int | None:
    """Tokens of one epoch of every source of a plan, where all are known."""
    epochs = [
        source["tokens_per_epoch"] for source in plan["sources"] if source["rows"] is not None
    ]
    return None if None in epochs else sum(epochs)

"""A run by its tokens: how many there will be, and how far it has come."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat, TextIO

from tokenloom_proto.batch_schedule import BatchSchedule, Sizes

if TYPE_CHECKING:
    from typing_extensions import Self

    from tokenloom.datasets.order import CommittedDataset


# How long a training run is, in tokens, and how many steps that makes.


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


# How far a training run is, by its tokens: lines for a log, a bar on a terminal.


_UNITS = ((1e12, "t"), (1e9, "b"), (1e6, "m"), (1e3, "k"))


class TokenProgress:
    """Start lines, then a line every ``every_s`` seconds, or a bar where there is a terminal.

        with TokenProgress(budget, rank=dataset.rank) as progress:
            for batch in dataset:
                …
                progress.update(batch, loss=loss, lr=scheduler.get_last_lr()[0])

    Lines go to ``write`` (by default to standard error, flushed; a logger's ``info`` will do). ``bar`` is by default
    whether standard error is a terminal and ``tqdm`` is installed (``pip install 'tokenloom[progress]'``). Ranks but 0
    say nothing. ``Total`` is the share of the budget's target that the run's tokens are, over all restarts; the
    estimate of the time that is left comes from this process's own rate. ``Step`` counts the optimiser steps of this
    process, ``Global`` those of the run: only shown, never trained by, and kept by ``state_dict()``; where none was
    loaded it is made from the run's samples by the budget's batch plan.
    """

    def __init__(
        self,
        budget: TokenBudget,
        *,
        rank: int = 0,
        every_s: float = 10.0,
        write: Callable[[str], object] | None = None,
        bar: bool | None = None,
    ) -> None:
        self._budget = budget
        self._silent = rank != 0
        self._every_s = every_s
        self._stream: TextIO = sys.stderr
        self._write: Callable[[str], object] = write or partial(
            print, file=self._stream, flush=True
        )
        self._wants_bar = (write is None and self._stream.isatty()) if bar is None else bar
        self._must_have_bar = bar is True
        self._bar: Any = None
        self._step = 0
        self._samples = 0
        # Of the run, where a state was loaded.
        self._loaded_steps: int | None = None
        self._began: tuple[float, int] | None = None
        self._next_line_at = 0.0
        self._last: tuple[Mapping[str, Any], dict[str, Any]] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Writes the two lines of the budget."""
        if not self._silent:
            for line in self._budget.lines():
                self._write(line)

    def update(
        self, batch: Mapping[str, Any], *, step: bool = True, **figures: SupportsFloat | str
    ) -> None:
        """A batch was trained on. ``figures``, such as ``loss`` and ``lr``, are shown in their order; a tensor is only
        read when it is. ``step=False``: it was not the last of its optimiser step."""
        total, self._samples = batch["total_tokens"], batch["sample_index"]
        if step:
            self._step += 1
            if self._loaded_steps is not None:
                self._loaded_steps += 1
        if self._silent:
            return
        now = time.monotonic()
        if self._began is None:
            self._began = now, total
            self._next_line_at = now
            self._open_bar(total)
        self._last = batch, dict(figures)
        if now < self._next_line_at:
            return
        self._next_line_at = now + (0.2 if self._bar is not None else self._every_s)
        self._show()

    def close(self) -> None:
        """Shows where it stands at the end."""
        if self._last is not None:
            self._show()
            self._last = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def line(self, batch: Mapping[str, Any], **figures: SupportsFloat | str) -> str:
        """One line of progress."""
        total = batch["total_tokens"]
        shown = {"Tokens": _short(total), "Total": f"{self._share(total):.1%}"}
        shown["Samples"] = _short(batch["sample_index"])
        if (epoch := self._epoch(total)) is not None:
            shown["Epoch"] = str(epoch)
        shown |= {"Step": str(self._step), "Global": str(self._global_step)}
        shown |= {_name(name): _figure(name, value) for name, value in figures.items()}
        if (left_s := self._left_s(total)) is not None:
            shown["ETA"] = _duration(left_s)
        return ", ".join(f"{name} {value}" for name, value in shown.items())

    def state_dict(self) -> dict[str, int]:
        """The number of optimiser steps of the run; the same on every rank."""
        return {"global_step": self._global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from a saved number."""
        self._loaded_steps = int(state["global_step"])

    def _show(self) -> None:
        assert self._last is not None
        batch, figures = self._last
        if self._bar is None:
            self._write(self.line(batch, **figures))
            return
        self._bar.n = min(batch["total_tokens"], self._bar.total)
        shown = {"step": str(self._global_step)}
        shown |= {_name(name): _figure(name, value) for name, value in figures.items()}
        self._bar.set_postfix(shown, refresh=True)

    def _open_bar(self, total: int) -> None:
        if not self._wants_bar:
            return
        try:
            from tqdm.auto import tqdm
        except ModuleNotFoundError:
            if self._must_have_bar:
                raise ModuleNotFoundError(
                    "TokenProgress(bar=True) needs tqdm: pip install 'tokenloom[progress]'",
                    name="tqdm",
                ) from None
            return
        self._bar = tqdm(
            total=self._budget.target_total_tokens,
            initial=total,
            unit="tok",
            unit_scale=True,
            dynamic_ncols=True,
        )

    def _share(self, total: int) -> float:
        return total / self._budget.target_total_tokens

    def _epoch(self, total: int) -> int | None:
        samples = self._budget.dataset_samples
        return 1 + (total - 1) // (samples * self._budget.context_length) if samples else None

    @property
    def _global_step(self) -> int:
        if self._loaded_steps is not None:
            return self._loaded_steps
        whole, rest = self._budget.steps(self._samples)
        return whole + bool(rest)

    def _left_s(self, total: int) -> float | None:
        if self._began is None or total <= self._began[1]:
            return None
        rate = (total - self._began[1]) / max(time.monotonic() - self._began[0], 1e-9)
        return max(0, self._budget.target_total_tokens - total) / rate


def _name(name: str) -> str:
    return name.upper() if len(name) <= 2 else name[0].upper() + name[1:]


def _figure(name: str, value: SupportsFloat | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return _short(value)
    number = float(value)
    small = name.lower() in ("lr", "learning_rate") or 0 < abs(number) < 1e-3
    return f"{number:.2e}" if small else f"{number:.4f}"


def _short(count: float) -> str:
    """38.4k, 1.2m, 812."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""How far a training run is, by its tokens: lines for a log, a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat, TextIO

from tokenloom.clock.token_budget import TokenBudget

if TYPE_CHECKING:
    from typing_extensions import Self

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

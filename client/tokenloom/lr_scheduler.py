"""A learning-rate schedule whose clock is the run's tokens.

Every batch carries the run's cumulative token count, the same on each rank; so the schedule needs no
all-reduce, and does not jump when a resume changes the batch size or the number of ranks.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

log = logging.getLogger("tokenloom")

_SCHEDULE = ("warmup_tokens", "target_tokens", "min_lr_ratio")
_KEYS = {"total_tokens", "base_lrs", *_SCHEDULE}


class TokenLRScheduler(LRScheduler):
    """Linear warm-up from 0 over ``warmup_tokens``, then a cosine down to ``min_lr_ratio`` at ``target_tokens``.

    The rate is a pure function of the tokens: ``scheduler.step(batch["total_tokens"])`` gives the same
    value to the bit however the run came there, also backwards after a rollback. To change the schedule
    of a run that goes on, give ``last_total_tokens=dataset.total_tokens`` in place of loading a state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_tokens: int,
        target_tokens: int,
        min_lr_ratio: float = 0.0,
        last_total_tokens: int = 0,
    ) -> None:
        self.warmup_tokens = _tokens("warmup_tokens", warmup_tokens)
        self.target_tokens = _tokens("target_tokens", target_tokens)
        self.min_lr_ratio = float(min_lr_ratio)
        self.total_tokens = _tokens("last_total_tokens", last_total_tokens)
        if self.target_tokens < 1 or self.warmup_tokens > self.target_tokens:
            raise ValueError(
                f"target_tokens must be at least 1 and not below warmup_tokens; "
                f"got warmup_tokens={warmup_tokens}, target_tokens={target_tokens}"
            )
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio must be between 0 and 1; got {min_lr_ratio}")
        super().__init__(optimizer)

    def _initial_step(self) -> None:
        # The base class would call step() without tokens, and count calls to warn of their order; here
        # the order does not matter, because the rate does not depend on how often step() was called.
        self._step_count = 1
        self._apply()

    def step(self, total_tokens: int) -> None:  # type: ignore[override]
        """Sets the rate for a run that has had ``total_tokens``: those of the last batch."""
        self.total_tokens = _tokens("total_tokens", total_tokens)
        self._apply()

    def factor(self, total_tokens: int) -> float:
        """The share of the base rate at a token count."""
        if total_tokens >= self.target_tokens:
            return self.min_lr_ratio
        if total_tokens < self.warmup_tokens:
            return total_tokens / self.warmup_tokens
        progress = (total_tokens - self.warmup_tokens) / (self.target_tokens - self.warmup_tokens)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each parameter group at the current token count."""
        factor = self.factor(self.total_tokens)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the schedule and where it stands."""
        base_lrs = [float(base) for base in self.base_lrs]
        return {
            "total_tokens": self.total_tokens,
            "base_lrs": base_lrs,
            **{key: getattr(self, key) for key in _SCHEDULE},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a saved schedule as it was, and sets the rate; says so where it differs from this one."""
        if set(state_dict) != _KEYS:
            raise ValueError(f"a state of TokenLRScheduler has the keys {sorted(_KEYS)}; got {sorted(state_dict)}")
        if len(state_dict["base_lrs"]) != len(self.base_lrs):
            raise ValueError(
                f"the state has {len(state_dict['base_lrs'])} parameter groups, the optimizer {len(self.base_lrs)}"
            )
        for key in _SCHEDULE:
            if state_dict[key] != getattr(self, key):
                log.warning("%s: the loaded %s replaces %s", key, state_dict[key], getattr(self, key))
            setattr(self, key, state_dict[key])
        self.base_lrs = list(state_dict["base_lrs"])
        self.step(state_dict["total_tokens"])

    def _apply(self) -> None:
        self.last_epoch = self.total_tokens  # the base class's name for the clock, which some tools print
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def _tokens(name: str, value: object) -> int:
    """A token count; whole floats such as ``2e9`` are welcome."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        tokens = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a whole number of tokens; got {value!r}") from None
    if tokens < 0:
        raise ValueError(f"{name} must not be negative; got {tokens}")
    return tokens

"""A learning-rate schedule whose clock is the run's tokens.

Every batch carries the run's cumulative token count, the same on each rank; so the schedule needs no
all-reduce, and does not jump when a resume changes the batch size or the number of ranks.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

log = logging.getLogger("tokenloom")

Shape = Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"]
DecayShape = Literal["linear", "cosine", "one_minus_sqrt"]

_SCHEDULE = (
    "shape",
    "warmup_tokens",
    "target_tokens",
    "decay_start_tokens",
    "decay_shape",
    "min_lr_ratio",
)
_KEYS = {"total_tokens", "base_lrs", *_SCHEDULE}

#: What is left of the way from the full rate to the least one, by how much of the decay is over (0 to 1).
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda over: 1.0 - over,
    "cosine": lambda over: 0.5 * (1.0 + math.cos(math.pi * over)),
    "one_minus_sqrt": lambda over: 1.0 - math.sqrt(over),
}


class TokenLRScheduler(LRScheduler):
    """Linear warm-up from 0 over ``warmup_tokens``, then ``shape``, by the run's tokens.

    With t the run's total tokens, and the rate as a share of each parameter group's own base rate:

    - ``cosine``, ``linear``: from 1 at ``warmup_tokens`` down to ``min_lr_ratio`` at ``target_tokens``.
    - ``constant``: 1.
    - ``inverse_sqrt``: sqrt(warmup_tokens / t), not below ``min_lr_ratio`` (Vaswani et al. 2017, arXiv:1706.03762).
    - ``wsd``: warm-up, stable at 1 until ``decay_start_tokens``, then a decay to ``min_lr_ratio`` at ``target_tokens``
      (Hu et al. 2024, arXiv:2404.06395), in ``decay_shape``: ``linear``, ``cosine`` or ``one_minus_sqrt``, which is
      1 − sqrt(x) (Hägele et al. 2024, arXiv:2405.18392).

    Behind ``target_tokens`` the rate stays as it is there; ``constant`` and ``inverse_sqrt`` need none.

    The rate is a pure function of the tokens: ``scheduler.step(batch["total_tokens"])`` gives the same
    value to the bit however the run came there, also backwards after a rollback. To change the schedule
    of a run that goes on, give ``last_total_tokens=dataset.total_tokens`` in place of loading a state.

    Raises ``ValueError`` for counts that are no whole numbers or in the wrong order, for a ratio outside 0 to 1, and
    for what the shape lacks or does not know.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_tokens: int,
        target_tokens: int | None = None,
        shape: Shape = "cosine",
        decay_start_tokens: int | None = None,
        decay_shape: DecayShape = "linear",
        min_lr_ratio: float = 0.0,
        last_total_tokens: int = 0,
    ) -> None:
        self.shape = shape
        self.warmup_tokens = _tokens("warmup_tokens", warmup_tokens)
        self.target_tokens = (
            None if target_tokens is None else _tokens("target_tokens", target_tokens)
        )
        self.decay_start_tokens = (
            None
            if decay_start_tokens is None
            else _tokens("decay_start_tokens", decay_start_tokens)
        )
        self.decay_shape = decay_shape
        self.min_lr_ratio = float(min_lr_ratio)
        self.total_tokens = _tokens("last_total_tokens", last_total_tokens)
        self._check()
        super().__init__(optimizer)

    def _check(self) -> None:
        if self.shape not in get_args(Shape):
            raise ValueError(
                f"shape must be one of {', '.join(get_args(Shape))}; got {self.shape!r}"
            )
        if self.decay_shape not in _DECAYS:
            raise ValueError(
                f"decay_shape must be one of {', '.join(_DECAYS)}; got {self.decay_shape!r}"
            )
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio must be between 0 and 1; got {self.min_lr_ratio}")
        warmup, target, start = self.warmup_tokens, self.target_tokens, self.decay_start_tokens
        if self.shape in ("cosine", "linear", "wsd") and target is None:
            raise ValueError(f"target_tokens is missing: {self.shape} has its end there")
        if target is not None and (target < 1 or warmup > target):
            raise ValueError(
                f"target_tokens must be at least 1 and not below warmup_tokens; "
                f"got warmup_tokens={warmup}, target_tokens={target}"
            )
        if self.shape == "inverse_sqrt" and not warmup:
            raise ValueError(
                "warmup_tokens must be at least 1 with inverse_sqrt, which is sqrt(warmup_tokens / tokens) after it"
            )
        if self.shape != "wsd":
            if start is not None or self.decay_shape != "linear":
                raise ValueError(
                    f"decay_start_tokens and decay_shape belong to wsd; leave them out with shape={self.shape!r}"
                )
            return
        if start is None or target is None or not warmup <= start <= target:
            raise ValueError(
                "wsd needs decay_start_tokens, between warmup_tokens and target_tokens; "
                f"got warmup_tokens={warmup}, decay_start_tokens={start}, target_tokens={target}"
            )

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
        if total_tokens < self.warmup_tokens:
            return total_tokens / self.warmup_tokens
        if self.shape == "constant":
            return 1.0
        if self.shape == "inverse_sqrt":
            return max(self.min_lr_ratio, math.sqrt(self.warmup_tokens / total_tokens))
        assert self.target_tokens is not None  # as _check wants it
        if total_tokens >= self.target_tokens:
            return self.min_lr_ratio
        if self.shape == "wsd":
            assert self.decay_start_tokens is not None
            begin, decay = self.decay_start_tokens, self.decay_shape
        else:
            begin, decay = self.warmup_tokens, self.shape
        if total_tokens <= begin:
            return 1.0
        over = (total_tokens - begin) / (self.target_tokens - begin)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * _DECAYS[decay](over)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each parameter group at the current token count."""
        factor = self.factor(self.total_tokens)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and names: the schedule and where it stands."""
        base_lrs = [float(base) for base in self.base_lrs]
        return {
            "total_tokens": self.total_tokens,
            "base_lrs": base_lrs,
            **{key: getattr(self, key) for key in _SCHEDULE},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a saved schedule as it was, and sets the rate; says so where it differs from this one.

        Also a checkpoint of a scheduler that counted steps, if it has ``total_tokens``: that, and its ``base_lrs``, are
        taken over, and the schedule stays the one given here. Raises ``ValueError`` without ``total_tokens``, and for
        another number of parameter groups.
        """
        if "total_tokens" not in state_dict:
            raise ValueError(
                f"a state of TokenLRScheduler has the keys {sorted(_KEYS)}, and one of a scheduler that counts steps "
                f"must have total_tokens beside them; got {sorted(map(str, state_dict))}"
            )
        base_lrs = list(state_dict.get("base_lrs", self.base_lrs))
        if len(base_lrs) != len(self.base_lrs):
            raise ValueError(
                f"the state has {len(base_lrs)} parameter groups, the optimizer {len(self.base_lrs)}"
            )
        total_tokens = _tokens("total_tokens", state_dict["total_tokens"])
        own_lrs = [float(base) for base in self.base_lrs]
        if [float(base) for base in base_lrs] != own_lrs:
            log.warning("base_lrs: the loaded %s replaces %s", base_lrs, own_lrs)
        if set(state_dict) == _KEYS:
            for key in _SCHEDULE:
                if state_dict[key] != getattr(self, key):
                    log.warning(
                        "%s: the loaded %s replaces %s; for a new schedule load no state, and give "
                        "last_total_tokens=dataset.total_tokens", key, state_dict[key], getattr(self, key),
                    )  # fmt: skip
                setattr(self, key, state_dict[key])
            self._check()
        else:
            left = sorted(map(str, set(state_dict) - {"total_tokens", "base_lrs"}))
            log.warning(
                "a scheduler's state that is not TokenLRScheduler's: it goes on at its %d tokens by the schedule given "
                "here; not looked at: %s", total_tokens, ", ".join(left),
            )  # fmt: skip
        self.base_lrs = base_lrs
        self.step(total_tokens)

    def _apply(self) -> None:
        self.last_epoch = (
            self.total_tokens
        )  # the base class's name for the clock, which some tools print
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

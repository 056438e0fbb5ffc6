"""How a node's tokens fall to its children, by policy: means over a span, instead of a choice for each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.mixing.varying import UPDATE_SAMPLES

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: A child of ``soft_sequential`` counts as having this much of a sample left at least. The policy counts a whole one
#: until the pick that finds it out, so that a child of N samples takes (1/N + … + 1/2 + 1 + 1) N of its node's; a fluid
#: takes as long with e^-0.5772 (Euler's constant).
_LEAST_SOFT = 0.5615
#: How far the remaining part of a child may fall within one step.
_STEP = 0.02
#: Steps that a segment between two points of a schedule is cut into.
_SEGMENT_STEPS = 64
#: Points and weights of a mean over [0, 1] (Gauss-Legendre): exact for polynomials of degree 5.
_MEAN = ((0.1127016653792583, 5 / 18), (0.5, 8 / 18), (0.8872983346207417, 5 / 18))


class Span(NamedTuple):
    """From a total of the run's tokens on, so many of the run's tokens and of the node's own."""

    at: float
    run: float
    own: float


class Shares(Protocol):
    """Which children get how much of a node's tokens? Knows the children by arrays: which are live, what is left of
    them and what they gave, in tokens."""

    #: Whether ``left`` is looked at.
    looks_ahead: bool

    def over(self, live: Flags, left: Floats, given: Floats, span: Span) -> Floats:
        """The mean shares over a span that begins now. At least one child is live; the others get nothing."""

    def reach(self, live: Flags, left: Floats, given: Floats, at: float, rate: float) -> float:
        """How long a span may be at most, in the run's tokens, of which ``rate`` are the node's."""


class Fixed:
    """By weight: ``least_consumed``, ``weighted`` in expectation, ``round_robin`` with equal ones."""

    looks_ahead = False

    def __init__(self, weights: Floats) -> None:
        self._weights = weights

    def over(self, live: Flags, left: Floats, given: Floats, span: Span) -> Floats:
        return _normal(np.where(live, self._weights, 0.0))

    def reach(self, live: Flags, left: Floats, given: Floats, at: float, rate: float) -> float:
        return math.inf


class First:
    """``sequential``: the first live child has all."""

    looks_ahead = False

    def over(self, live: Flags, left: Floats, given: Floats, span: Span) -> Floats:
        found = np.zeros(len(live))
        found[np.argmax(live)] = 1.0
        return found

    def reach(self, live: Flags, left: Floats, given: Floats, at: float, rate: float) -> float:
        return math.inf


class Balanced:
    """``balance_remaining``: by what is left. All shrink in proportion then, so shares stay as they are."""

    looks_ahead = True

    def __init__(self, sample_tokens: int) -> None:
        self._least = float(sample_tokens)

    def over(self, live: Flags, left: Floats, given: Floats, span: Span) -> Floats:
        return _normal(np.where(live, np.maximum(left, self._least), 0.0))

    def reach(self, live: Flags, left: Floats, given: Floats, at: float, rate: float) -> float:
        return math.inf


class Soft:
    """``soft_sequential``: a child gets what its forerunners leave of each token, times what is left of it.

    With the shares of others unchanged, what is left of a child falls exponentially; that is what a step takes it for.
    Small nodes are gone through as the policy does it: shares stand for ``UPDATE_SAMPLES`` samples of the run.
    """

    looks_ahead = True

    def __init__(self, sample_tokens: int) -> None:
        self._least = _LEAST_SOFT * sample_tokens
        self._update = float(UPDATE_SAMPLES * sample_tokens)

    def over(self, live: Flags, left: Floats, given: Floats, span: Span) -> Floats:
        now = self._at(live, left, left + given)
        if span.run <= self._update:
            return now
        half = self._after(left, now, left, span.own / 2)
        middle = self._at(live, half, left + given)
        return _normal(np.where(live, left - self._after(left, middle, half, span.own), 0.0))

    def reach(self, live: Flags, left: Floats, given: Floats, at: float, rate: float) -> float:
        fall = float((self._at(live, left, left + given) / np.maximum(left + given, self._least)).max())
        run = _STEP / fall / rate
        return run if run > 8 * self._update else self._update

    def _at(self, live: Flags, left: Floats, total: Floats) -> Floats:
        part = np.where(live, np.minimum(np.maximum(left, self._least) / np.maximum(total, self._least), 1.0), 0.0)
        before = np.concatenate(([1.0], np.cumprod(1.0 - part)[:-1]))
        return _normal(part * before)

    def _after(self, left: Floats, shares: Floats, base: Floats, tokens: float) -> Floats:
        """What is left after so many tokens of the node, where a child's share is to what is left as now ``shares``
        are to ``base``. A child whose last sample is drawn for keeps its share."""
        falls = shares / np.maximum(base, self._least)
        return np.where(
            left > self._least,
            np.maximum(left * np.exp(-falls * tokens), np.minimum(left, self._least)),
            left - falls * self._least * tokens,
        )


class Scheduled:
    """``schedule``: weights that follow the run's total tokens, by points.

    They do so every ``UPDATE_SAMPLES`` samples: a step comes with the next of these, and between points weights are on
    average half of these late.
    """

    looks_ahead = False

    def __init__(self, points: Sequence[Sequence[tuple[int, float]]], *, in_steps: bool, sample_tokens: int) -> None:
        update = UPDATE_SAMPLES * sample_tokens

        def comes_at(tokens: int) -> float:
            if in_steps:
                return float(-(-tokens // update) * update)
            # What is in force at the beginning is so at once.
            return tokens + update / 2 if tokens else 0.0

        self._tokens = [np.array([comes_at(tokens) for tokens, _ in child]) for child in points]
        self._weights = [np.array([weight for _, weight in child]) for child in points]
        self._edges = np.unique(np.concatenate(self._tokens))
        self._steps = in_steps

    def over(self, live: Flags, left: Floats, given: Floats, span: Span) -> Floats:
        if span.run <= 0:
            return self._at(live, span.at)
        found = np.zeros(len(live))
        for point, weight in _MEAN:
            found += weight * self._at(live, span.at + point * span.run)
        return _normal(found)

    def reach(self, live: Flags, left: Floats, given: Floats, at: float, rate: float) -> float:
        next_edge = int(np.searchsorted(self._edges, at * (1 + 1e-12), "right"))
        if next_edge == len(self._edges):
            return math.inf
        end = float(self._edges[next_edge])
        if self._steps or not next_edge:
            return end - at
        return min(end - at, (end - float(self._edges[next_edge - 1])) / _SEGMENT_STEPS)

    def _at(self, live: Flags, at: float) -> Floats:
        weights = np.zeros(len(live))
        for i in np.flatnonzero(live):
            if self._steps:
                behind = int(np.searchsorted(self._tokens[i], at, "right"))
                weights[i] = self._weights[i][max(0, behind - 1)]
            else:
                weights[i] = np.interp(at, self._tokens[i], self._weights[i])
        # Where all that is left has the weight 0, it shares equally rather than end the node.
        return _normal(weights if weights.any() else live.astype(np.float64))


def shares_of(node: NodeConfig, sample_tokens: int) -> Shares:
    """How a node shares its tokens out."""
    points = [child.weight if isinstance(child.weight, list) else [(0, child.weight)] for child in node.children]
    match node.policy:
        case "least_consumed" | "weighted" | "round_robin":
            return Fixed(np.array([weight for ((_, weight),) in points]))
        case "sequential":
            return First()
        case "soft_sequential":
            return Soft(sample_tokens)
        case "balance_remaining":
            return Balanced(sample_tokens)
        case "schedule":
            return Scheduled(points, in_steps=node.interpolate == "step", sample_tokens=sample_tokens)


def _normal(weights: Floats) -> Floats:
    total = float(weights.sum())
    return weights / total if total > 0 else weights

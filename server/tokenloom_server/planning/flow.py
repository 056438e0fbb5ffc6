"""From a tree to its end: segments of the run with their shares, and what ends between them.

Nothing is decided sample by sample. While no child runs out, shares are constant or follow a curve that a step may be
taken along, so 10^12 tokens cost as many steps as there are sources and bends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenloom_server.planning.segments import MAX_SEGMENTS, PlanSegment, merged
from tokenloom_server.planning.shares import Floats, Span
from tokenloom_server.planning.tree import Branch, Leaf

#: A plan that takes more steps than this is a fault of ours.
_MAX_STEPS = 1_000_000
#: What of a sample may be left of a source that is out: more than rounding makes, less than any sample.
_NOTHING_LEFT = 1e-3


@dataclass(frozen=True, slots=True)
class Ending:
    """At a total of the run's tokens, a source (by id; None for a node) has no more to give, and why."""

    at: float
    name: str
    source: int | None
    why: str


@dataclass(slots=True)
class Flowed:
    """How it went, up to a total of the run's tokens."""

    reached: float
    segments: list[PlanSegment] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    #: Nothing ends any more: what is left is read for ever.
    endless: bool = False


def flow(root: Branch, leaves: Sequence[Leaf], flowed: Flowed, until: float, sample_tokens: int) -> None:
    """Lets the tree flow on from where the flowed stands until it is over, or the run has ``until`` tokens."""
    branches = list(root.downwards())
    nothing = _NOTHING_LEFT * sample_tokens
    _close(branches, flowed, nothing)
    for _ in range(_MAX_STEPS):
        if root.over or flowed.reached >= until:
            return
        length = _length(branches, flowed.reached, until)
        if math.isinf(length):
            flowed.endless = True
            return
        rates = _rates(branches, flowed.reached, length)
        while (part := _part(branches, rates, length)) < 1 - 1e-12:
            length *= part
            rates = _rates(branches, flowed.reached, length)
        _take(branches, rates, length)
        shares = dict.fromkeys(range(len(leaves)), 0.0)
        for branch, rate in zip(branches, rates, strict=True):
            for child, its in zip(branch.children, rate.tolist(), strict=True):
                if isinstance(child, Leaf):
                    shares[child.config.id] = its
        end = min(flowed.reached + length, until)
        flowed.segments.append(PlanSegment(flowed.reached, end, np.array(list(shares.values()))))
        if len(flowed.segments) > 2 * MAX_SEGMENTS:
            flowed.segments = merged(flowed.segments, MAX_SEGMENTS)
        flowed.reached = end
        _close(branches, flowed, nothing)
    raise AssertionError(f"a plan took more than {_MAX_STEPS} steps")


def _rates(branches: Sequence[Branch], at: float, length: float) -> list[Floats]:
    """The mean part of the run's tokens that each node's children get over the next ``length`` tokens."""
    own = {id(branches[0]): 1.0}
    found = []
    for branch in branches:
        rate = own.get(id(branch), 0.0)
        if not rate:
            found.append(np.zeros(len(branch.children)))
            continue
        rates = branch.shares(Span(at, length, rate * length)) * rate
        found.append(rates)
        for child, its in zip(branch.children, rates.tolist(), strict=True):
            own[id(child)] = its
    return found


def _length(branches: Sequence[Branch], at: float, until: float) -> float:
    """How far a step may go by what the shares are now."""
    rates = _rates(branches, at, 0.0)
    length = min(until - at, branches[0].room)
    for branch, rate in zip(branches, rates, strict=True):
        total = float(rate.sum())
        if total:
            flows = rate > 0
            length = min(length, branch.reach(at, total), float((branch.limits()[flows] / rate[flows]).min()))
    return length


def _part(branches: Sequence[Branch], rates: Sequence[Floats], length: float) -> float:
    """Which part of a step may be taken until the first child has no more."""
    part = 1.0
    for branch, rate in zip(branches, rates, strict=True):
        flows = rate > 0
        if flows.any():
            part = min(part, float((branch.limits()[flows] / (rate[flows] * length)).min()))
    return part


def _take(branches: Sequence[Branch], rates: Sequence[Floats], length: float) -> None:
    for branch, rate in zip(branches, rates, strict=True):
        branch.take(rate * length)


def _close(branches: Sequence[Branch], flowed: Flowed, nothing: float) -> None:
    """Marks what has no more to give, from the leaves up: a node's end may be its parent's."""
    for branch in reversed(branches):
        for i, child in enumerate(branch.children):
            if not branch.live[i] or branch.stopped:
                continue
            if isinstance(child, Leaf):
                if child.left > nothing:
                    continue
                child.out = True
                why = "has its max_tokens" if child.capped else "is exhausted"
            elif child.over:
                why = child.stopped or "has no child left"
            else:
                continue
            branch.live[i] = False
            if isinstance(child, Branch) and child.waits:
                continue
            branch.exhausted[i] = True
            source = child.config.id if isinstance(child, Leaf) else None
            flowed.endings.append(Ending(flowed.reached, child.name, source, why))
            if branch.ends(i):
                branch.stopped = f"stops, as {child.name} {why}"
        if branch.room <= nothing and not branch.over:
            branch.stopped = "has its max_tokens"

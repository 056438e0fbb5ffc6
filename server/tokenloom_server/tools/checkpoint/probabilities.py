"""A node's next sample: with which probability each child gives it, and what the saved counters have to do with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenloom_server.mixing.schedule import Schedule
from tokenloom_server.mixing.varying import Left, balance_remaining, soft_sequential
from tokenloom_server.mixing.weights import integer_weights
from tokenloom_server.tools.checkpoint.content import Child, Content, Node

_RULES = {"soft_sequential": soft_sequential, "balance_remaining": balance_remaining}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """A child's share of its node's next samples, 0 to 1: as saved (None where the policy saves no weights), made anew
    from the saved counters, and as it would be if those were lost and began at 0. None where it cannot be told."""

    in_force: float | None
    with_counters: float | None
    without_counters: float | None


def chances(content: Content, node: Node) -> list[Chance]:
    """By child. Of a deterministic policy they are shares."""
    saved = [child.weight or 0 for child in node.children]
    forced = _shares(saved) if any(saved) else None
    now, anew = _weights(content, node, counted=True), _weights(content, node, counted=False)
    with_counters = _shares(now) if now is not None else None
    without = _shares(anew) if anew is not None else None
    return [
        Chance(
            in_force=forced[i] if forced else with_counters[i] if with_counters else None,
            with_counters=with_counters[i] if with_counters else None,
            without_counters=without[i] if without else None,
        )
        for i in range(len(node.children))
    ]


def owed_samples(content: Content, node: Node, child: Child) -> float | None:
    """What a child is owed (below 0: had in advance) in samples; None where the policy keeps no credits."""
    if child.credit is None or content.sequence_length is None or node.policy in (None, "round_robin"):
        return None
    weights = [other.weight or 0 for other in node.children]
    if not any(weights):
        weights = [int(weight) for weight in _weights(content, node, counted=True) or ()]
    return child.credit / (sum(weights) * content.sequence_length) if any(weights) else None


def _weights(content: Content, node: Node, *, counted: bool) -> Sequence[float] | None:
    """The children's weights; with ``counted`` false, as if nothing was counted yet."""
    live = [child.presence == "live" and not (counted and child.exhausted) for child in node.children]
    if node.policy in _RULES:
        return _of_totals(node, live, _RULES[node.policy], counted=counted)
    if node.policy == "sequential":
        first = live.index(True) if any(live) else -1
        return [float(i == first) for i in range(len(live))]
    if node.policy == "round_robin":
        return [float(there) for there in live]
    said = [points(child.configured) for child in node.children]
    if any(weight is None for weight in said):
        return None
    weights = [weight for weight in said if weight is not None]
    if node.policy == "schedule":
        schedule = Schedule(weights, linear=node.interpolate == "linear")
        return _masked(schedule.weights((content.total_tokens or 0) if counted else 0), live)
    if node.policy in ("least_consumed", "weighted") and all(len(own) == 1 and own[0][1] for own in weights):
        return _masked(integer_weights([own[0][1] for own in weights]), live)
    return None


def _of_totals(
    node: Node, live: Sequence[bool], rule: Callable[[Sequence[Left]], Sequence[int]], *, counted: bool
) -> Sequence[float] | None:
    children = [child for child, there in zip(node.children, live, strict=True) if there]
    if not all(child.total for child in children) or any(child.samples is None for child in children):
        return None
    left = []
    for child in children:
        rest = max(1, (child.total or 0) - ((child.samples or 0) if counted else 0))
        left.append(Left(rest, max(rest, child.total or 0)))
    found = iter(rule(left))
    return [next(found) if there else 0 for there in live]


def points(weight: Any) -> list[tuple[int, float]] | None:
    """[tokens, weight] points, ascending; a plain weight is one. None where it is neither."""
    try:
        found = (
            [(int(tokens), float(own)) for tokens, own in weight] if isinstance(weight, list) else [(0, float(weight))]
        )
    except (TypeError, ValueError, OverflowError):
        return None
    ascending = all(before[0] < after[0] for before, after in pairwise(found))
    return found if found and ascending and all(0 <= own < math.inf for _, own in found) else None


def _masked(weights: Sequence[float], live: Sequence[bool]) -> list[float]:
    return [weight if there else 0 for weight, there in zip(weights, live, strict=True)]


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]

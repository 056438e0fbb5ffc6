"""A node's next sample: with which probability each child gives it, and what the saved counters have to do with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenloom_server.mixing.catalog import policies
from tokenloom_server.mixing.policy import Policy, SavedChild, SavedNode
from tokenloom_server.tools.checkpoint.content import Child, Content, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """A child's share of its node's next samples, 0 to 1: as saved (None where the policy saves no weights), made anew
    from the saved counters, and as it would be if those were lost and began at 0. None where it is not known."""

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
    policy = policy_of(node)
    if child.credit is None or content.sequence_length is None or policy is None or policy.credit == "turns":
        return None
    weights = [other.weight or 0 for other in node.children]
    if not any(weights):
        weights = [int(weight) for weight in _weights(content, node, counted=True) or ()]
    return child.credit / (sum(weights) * content.sequence_length) if any(weights) else None


def policy_of(node: Node) -> Policy | None:
    """The policy of a node; None where no mixture says it, or this release has no such policy."""
    return policies().get(node.policy or "")


def _weights(content: Content, node: Node, *, counted: bool) -> Sequence[float] | None:
    """The children's weights; with ``counted`` false, as if nothing was counted yet."""
    policy = policy_of(node)
    if policy is None:
        return None
    children = [
        SavedChild(
            live=child.presence == "live" and not (counted and child.exhausted),
            points=points(child.configured),
            picks=child.samples if counted or child.samples is None else 0,
            total=child.total,
        )
        for child in node.children
    ]
    tokens = (content.total_tokens or 0) if counted else 0
    return policy.saved_weights(SavedNode(children, tokens, node.interpolate))


def points(weight: Any) -> list[tuple[int, float]] | None:
    """[tokens, weight] points, ascending; a plain weight is one. None where it is neither."""
    schedule = weight if isinstance(weight, list) else [(0, weight)]
    try:
        points = [(int(tokens), float(own)) for tokens, own in schedule]
    except (TypeError, ValueError, OverflowError):
        return None
    ascending = all(before[0] < after[0] for before, after in pairwise(points))
    return points if points and ascending and all(0 <= own < math.inf for _, own in points) else None


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]

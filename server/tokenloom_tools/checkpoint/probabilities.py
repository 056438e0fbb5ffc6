"""A node's next sample: with which probability each child gives it, and what the saved counters have to do with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenloom_server.core.state import ChildState
from tokenloom_server.mixing.policies import policies
from tokenloom_server.mixing.policy import Children, NodeShape, NodeStart, Policy, integer_weights

from tokenloom_tools.checkpoint.content import Child, Content, Node


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
    with_counters = _shares(_weights(content, node, counted=True), len(saved))
    without_counters = _shares(_weights(content, node, counted=False), len(saved))
    in_force = _shares(saved, len(saved)) if any(saved) else with_counters
    return [
        Chance(in_force=now, with_counters=kept, without_counters=lost)
        for now, kept, lost in zip(in_force, with_counters, without_counters, strict=True)
    ]


def owed_samples(content: Content, node: Node, child: Child) -> float | None:
    """What a child is owed (below 0: had in advance) in samples; None where the policy keeps no credits."""
    policy = policy_of(node)
    if (
        child.credit is None
        or content.sequence_length is None
        or policy is None
        or policy.credit == "turns"
    ):
        return None
    weights = [other.weight or 0 for other in node.children]
    if not any(weights):
        weights = list(_weights(content, node, counted=True) or ())
    return child.credit / (sum(weights) * content.sequence_length) if any(weights) else None


def policy_of(node: Node) -> Policy | None:
    """The policy of a node; None where no mixture says it, or this release has no such policy."""
    return policies().get(node.policy or "")


def missing(content: Content, node: Node, *, counted: bool = True) -> list[str]:
    """What the weights of a node's children cannot be worked out without, and how to give it; with ``counted`` false,
    as if nothing was counted yet."""
    policy = policy_of(node)
    if policy is None:
        return [f"policy: found {node.policy!r}; --mixture FILE says it"]
    lacks = []
    for child in node.children:
        known = points(child.configured)
        plain = known is not None and len(known) == 1 and known[0][1] > 0
        if policy.takes != "nothing" and (
            known is None or (policy.takes == "numbers" and not plain)
        ):
            lacks.append(
                f"{child.name}: weight: found {child.configured!r}; --mixture FILE says it"
            )
        if policy.takes == "points" and counted and not plain and content.total_tokens is None:
            lacks.append(
                f"{child.name}: its weight follows total_tokens; write that into the checkpoint's copy"
            )
        if (
            policy.estimates
            and not _is_out(child, counted=counted)
            and (child.samples is None or not child.total)
        ):
            lacks.append(
                f"{child.name}: samples: found {child.samples} of {child.total} in all; examples_per_dataset in the "
                "checkpoint's copy says the one, and --mixture FILE the other, where its data are"
            )
    return lacks


def _is_out(child: Child, *, counted: bool) -> bool:
    return child.presence != "live" or (counted and child.exhausted)


def _weights(content: Content, node: Node, *, counted: bool) -> Sequence[int] | None:
    """The children's weights by the policy itself; with ``counted`` false, as if nothing was counted yet. None where
    the checkpoint does not say enough."""
    policy = policy_of(node)
    if policy is None or missing(content, node, counted=counted):
        return None
    curves = [points(child.configured) or [(0, 1.0)] for child in node.children]
    out = [_is_out(child, counted=counted) for child in node.children]
    size = len(curves)
    shape = NodeShape(
        node_id=node.id,
        seed=0,
        pick_tokens=1,
        weights=integer_weights(
            [own[0][1] if policy.takes == "numbers" else 1.0 for own in curves]
        ),
        child_ids=tuple(range(size)),
        points=tuple(curves),
        linear=node.interpolate == "linear",
    )
    picks = [(child.samples or 0) if counted else 0 for child in node.children]
    chooser = policy.chooser(
        NodeStart(shape, Children(picks, [0] * size, out, [0] * size), [ChildState()] * size)
    )
    chooser.update(
        [child.total or 0 for child in node.children], (content.total_tokens or 0) if counted else 0
    )
    return chooser.weights()


def points(weight: Any) -> list[tuple[int, float]] | None:
    """[tokens, weight] points, ascending; a plain weight is one. None where it is neither."""
    schedule = weight if isinstance(weight, list) else [(0, weight)]
    try:
        points = [(int(tokens), float(own)) for tokens, own in schedule]
    except (TypeError, ValueError, OverflowError):
        return None
    ascending = all(before[0] < after[0] for before, after in pairwise(points))
    return (
        points if points and ascending and all(0 <= own < math.inf for _, own in points) else None
    )


def _shares(weights: Sequence[float] | None, count: int) -> Sequence[float | None]:
    """Of each of ``count`` children; None where the weights are not known."""
    if weights is None:
        return [None] * count
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]

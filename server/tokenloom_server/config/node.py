"""A node: a policy over sources and other nodes; and the walks over the tree that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from tokenloom_server.config.base import Epochs, MaxTokens, Name, OnExhausted, Presence, Section, Weight
from tokenloom_server.config.source import SourceConfig


class NodeConfig(Section):
    """An inner node of the mixture: a policy over its children."""

    id: int = -1
    """The node id: given once, by ``RunConfig`` or a revision."""
    presence: Presence = "live"
    policy: Literal[
        "least_consumed",
        "weighted",
        "round_robin",
        "sequential",
        "soft_sequential",
        "balance_remaining",
        "schedule",
    ]
    """``least_consumed``: deterministic, within one sample of target. ``weighted``: seeded draws. ``round_robin``: a
    sample of each child in turn. ``sequential``: one child after the other. ``soft_sequential``: the same, but each
    begins while the one before it comes to its end. ``balance_remaining``: all end together. ``schedule``: weights by
    the run's total tokens."""
    children: Annotated[list[Child], Field(min_length=1)]
    """Sources, or nodes."""
    alias: Name | None = None
    """A short name for pages and logs."""
    weight: Weight = 1.0
    """Share within the parent node, relative to its siblings; below a ``schedule``, a number or points."""
    epochs: Epochs = 1.0
    """Multiplies the epochs of every source below."""
    max_tokens: MaxTokens | None = None
    """Gives at most so many tokens, in whole samples, since the run began; what would be beyond is its end."""
    on_exhausted: OnExhausted = "drop"
    """When a child runs out: ``drop`` renormalises the rest; ``stop`` ends this node."""
    unit: Literal["tokens", "samples"] = "tokens"
    """What the shares of ``weighted`` are counted in. Every sample of a run has the same length, so both give the same
    order."""
    interpolate: Literal["linear", "step"] = "linear"
    """Weights of a ``schedule`` between two points: in a straight line, or as at the one before."""

    @property
    def name(self) -> str:
        return self.alias or f"node {self.id}"

    @property
    def estimates(self) -> bool:
        """Whether weights follow from what the sources below have left."""
        return self.policy in ("soft_sequential", "balance_remaining")

    @model_validator(mode="after")
    def _weights_have_a_meaning(self) -> Self:
        for i, child in enumerate(self.children):
            if self.policy in ("round_robin", "sequential", "soft_sequential", "balance_remaining"):
                if child.weight != 1.0:
                    raise ValueError(
                        f"children.{i}.weight: found {_short_weight(child.weight)}, but the policy {self.policy!r} "
                        "knows no weights; leave it out, or take the policy 'least_consumed' or 'weighted'"
                    )
            elif self.policy != "schedule" and isinstance(child.weight, list):
                raise ValueError(
                    f"children.{i}.weight: found {_short_weight(child.weight)}, but the policy {self.policy!r} takes "
                    "one number; give one, or take the policy 'schedule'"
                )
        if self.policy == "schedule":
            self._some_weight_at_every_token()
        for option, policy in (("unit", "weighted"), ("interpolate", "schedule")):
            if getattr(self, option) != type(self).model_fields[option].default and self.policy != policy:
                raise ValueError(f"{option}: is for the policy {policy!r}, but this is {self.policy!r}; leave it out")
        return self

    def _some_weight_at_every_token(self) -> None:
        """Weights are above 0 somewhere between two points of any child if they are at one of them."""
        points = [child.weight if isinstance(child.weight, list) else [(0, child.weight)] for child in self.children]
        for tokens in sorted({0, *(at for weights in points for at, _ in weights)}):
            if not any(_is_above_0(weights, tokens, self.interpolate) for weights in points):
                raise ValueError(
                    f"children: at {tokens} tokens every weight is 0, and nothing could be given; let the weight of "
                    "one child begin earlier or end later"
                )


def _short_weight(weight: float | list[tuple[int, float]]) -> str:
    return f"{len(weight)} points" if isinstance(weight, list) else f"{weight:g}"


def _is_above_0(points: list[tuple[int, float]], tokens: int, interpolate: str) -> bool:
    before = [weight for at, weight in points if at <= tokens] or [points[0][1]]
    if before[-1] > 0 or interpolate == "step":
        return before[-1] > 0
    after = [weight for at, weight in points if at > tokens]
    return points[0][0] <= tokens and tokens not in [at for at, _ in points] and bool(after) and after[0] > 0


def _child_kind(value: object) -> str:
    if isinstance(value, NodeConfig) or (isinstance(value, dict) and ("children" in value or "policy" in value)):
        return "node"
    return "source"


Child = Annotated[
    Annotated[SourceConfig, Tag("source")] | Annotated[NodeConfig, Tag("node")],
    Discriminator(_child_kind),
]


def check_distinct(mixture: NodeConfig, at: str) -> None:
    seen: dict[str, str] = {}
    named: dict[str, str] = {}
    for path, source in walk(mixture, at):
        if source.source in seen:
            raise ValueError(
                f"{path}.source: {source.source!r} is there already, at {seen[source.source]}; "
                "counters are keyed by the spec, so name each spec once and give it the sum of the weights"
            )
        seen[source.source] = path
        if source.name in named:
            raise ValueError(
                f"{path}.alias: {source.name!r} names the source at {named[source.name]} already; give each its own"
            )
        named[source.name] = path


def check_ends(child: Child, path: str, endless: bool = False, estimated: str | None = None) -> None:
    """That what a policy estimates has an end. ``estimated``: the policy above that does so, unless a limit lies
    between."""
    if child.max_tokens is not None:
        estimated = None
    endless = endless or math.isinf(child.epochs)
    if isinstance(child, NodeConfig):
        for i, below in enumerate(child.children):
            check_ends(below, f"{path}.children.{i}", endless, child.policy if child.estimates else estimated)
    elif endless and estimated is not None and child.presence != "dropped":
        raise ValueError(
            f"{path}.epochs: found .inf, but the policy {estimated!r} above goes by what its sources have left; give "
            "a number, or max_tokens to the source or to a node between"
        )


def too_small_limits(child: Child, path: str, sample_tokens: int) -> Iterator[str]:
    """Limits that do not hold one sample."""
    if child.max_tokens is not None and child.max_tokens < sample_tokens:
        yield (
            f"{path}.max_tokens: {child.max_tokens} is less than one sample of {sample_tokens} tokens; give at least "
            "that many, or leave the child out"
        )
    if isinstance(child, NodeConfig):
        for i, below in enumerate(child.children):
            yield from too_small_limits(below, f"{path}.children.{i}", sample_tokens)


def walk(node: NodeConfig, path: str) -> Iterator[tuple[str, SourceConfig]]:
    for i, child in enumerate(node.children):
        at = f"{path}.children.{i}"
        if isinstance(child, NodeConfig):
            yield from walk(child, at)
        else:
            yield at, child


def numbered(mixture: NodeConfig) -> NodeConfig:
    """The tree with ids depth first, parents first: nodes and sources each count from 0."""
    nodes, sources = count(), count()

    def visit(node: NodeConfig) -> NodeConfig:
        number = next(nodes)
        children = [
            visit(child) if isinstance(child, NodeConfig) else child.model_copy(update={"id": next(sources)})
            for child in node.children
        ]
        return node.model_copy(update={"id": number, "children": children})

    return visit(mixture)


NodeConfig.model_rebuild()

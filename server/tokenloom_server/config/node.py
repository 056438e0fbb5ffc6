"""A node: a policy over sources and other nodes; and the walks over the tree that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tokenloom_server.config.base import (
    Epochs,
    MaxTokens,
    Name,
    OnExhausted,
    Presence,
    Section,
    Weight,
)
from tokenloom_server.config.catalog import PolicyRules, catalog_of
from tokenloom_server.config.source import SourceConfig


class NodeConfig(Section):
    """An inner node of the mixture: a policy over its children."""

    id: int = -1
    """The node id: given once, by ``RunConfig`` or a revision."""
    presence: Presence = "live"
    policy: str
    """How the next child is chosen."""
    children: Annotated[list[Child], Field(min_length=1)]
    """Sources, or nodes."""
    alias: Name | None = None
    """A short name for pages and logs."""
    weight: Weight = 1.0
    """Share within the parent node, relative to its siblings; below a ``schedule``, a number or points."""
    epochs: Epochs = 1.0
    """Multiplies the epochs of every source below."""
    max_tokens: MaxTokens | None = None
    """Ends the node after this many tokens since the run began, in whole samples."""
    on_exhausted: OnExhausted = "drop"
    """When a child runs out, ``drop`` shares its weight among the others, ``stop`` ends this node."""
    unit: Literal["tokens", "samples"] = "tokens"
    """The unit of the shares of ``weighted``. All samples of a run have the same length, so both give the same
    order."""
    interpolate: Literal["linear", "step"] = "linear"
    """Weights of a ``schedule`` between two points: on a straight line, or those of the earlier point."""

    @property
    def name(self) -> str:
        return self.alias or f"node {self.id}"

    _rules: PolicyRules = PrivateAttr()

    @property
    def rules(self) -> PolicyRules:
        """What its policy is, in the catalog that it was read against."""
        return self._rules

    @field_validator("policy")
    @classmethod
    def _is_in_the_catalog(cls, value: str, info: ValidationInfo) -> str:
        known = catalog_of(info.context).policies
        if value not in known:
            *some, last = map(repr, known)
            raise ValueError(f"Input should be {', '.join(some)} or {last}; found {value!r}")
        return value

    @model_validator(mode="after")
    def _weights_have_a_meaning(self, info: ValidationInfo) -> Self:
        policies = catalog_of(info.context).policies
        self._rules = policies[self.policy]
        options = {"unit": self.unit, "interpolate": self.interpolate}
        self.rules.check([child.weight for child in self.children], options)
        for option, value in options.items():
            if (
                value != type(self).model_fields[option].default
                and option not in self.rules.options
            ):
                owner = next(
                    policy.name for policy in policies.values() if option in policy.options
                )
                raise ValueError(
                    f"{option}: is for the policy {owner!r}, but this is {self.policy!r}; leave it out"
                )
        return self


def _child_kind(value: object) -> str:
    if isinstance(value, NodeConfig) or (
        isinstance(value, dict) and ("children" in value or "policy" in value)
    ):
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


def check_ends(
    child: Child, path: str, endless: bool = False, estimated: str | None = None
) -> None:
    """That what a policy estimates has an end. ``estimated``: the policy above that does so, unless a limit lies
    between."""
    if child.max_tokens is not None:
        estimated = None
    endless = endless or math.isinf(child.epochs)
    if isinstance(child, NodeConfig):
        for i, below in enumerate(child.children):
            check_ends(
                below,
                f"{path}.children.{i}",
                endless,
                child.policy if child.rules.estimates else estimated,
            )
    elif endless and estimated is not None and child.presence != "dropped":
        raise ValueError(
            f"{path}.epochs: found .inf, but the policy {estimated!r} above goes by what its sources have left; give "
            "a number, or max_tokens to the source or to a node between"
        )


def too_small_limits(mixture: NodeConfig, path: str, sample_tokens: int) -> Iterator[str]:
    """Limits that do not hold one sample."""
    for place, child, _ in descend(mixture, path):
        if child.max_tokens is not None and child.max_tokens < sample_tokens:
            yield (
                f"{place}.max_tokens: {child.max_tokens} is less than one sample of {sample_tokens} tokens; give at "
                "least that many, or leave the child out"
            )


def descend(
    child: Child, path: str, above: tuple[NodeConfig, ...] = ()
) -> Iterator[tuple[str, Child, tuple[NodeConfig, ...]]]:
    """A child and all below it, depth first, parents first: its place in the file, itself, and the nodes above it."""
    yield path, child, above
    if isinstance(child, NodeConfig):
        for i, below in enumerate(child.children):
            yield from descend(below, f"{path}.children.{i}", (*above, child))


def walk(child: Child, path: str) -> Iterator[tuple[str, SourceConfig]]:
    """The sources at or below a child, depth first, with their places in the file."""
    return (
        (place, below)
        for place, below, _ in descend(child, path)
        if isinstance(below, SourceConfig)
    )


def numbered(mixture: NodeConfig) -> NodeConfig:
    """The tree with ids depth first, parents first: nodes and sources each count from 0."""
    nodes, sources = count(), count()

    def visit(node: NodeConfig) -> NodeConfig:
        number = next(nodes)
        children = [
            visit(child)
            if isinstance(child, NodeConfig)
            else child.model_copy(update={"id": next(sources)})
            for child in node.children
        ]
        return node.model_copy(update={"id": number, "children": children})

    return visit(mixture)

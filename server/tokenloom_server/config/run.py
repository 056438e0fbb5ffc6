"""A run: one validated mixture file, and what follows from its tree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from typing import Any, Self

from pydantic import PrivateAttr, model_validator

from tokenloom_server.config.catalog import Catalog, catalog_of
from tokenloom_server.config.node import NodeConfig, numbered, walk
from tokenloom_server.config.run_checks import check_run
from tokenloom_server.config.run_fields import RunFields
from tokenloom_server.config.source import SourceConfig


class RunConfig(RunFields):
    """One run: what is read, how it is cut into samples, and in which proportions."""

    _catalog: Catalog = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._catalog = catalog_of(context)

    @property
    def catalog(self) -> Catalog:
        """What the run was read against."""
        return self._catalog

    @model_validator(mode="after")
    def _check_and_number(self) -> Self:
        check_run(self)
        if self.mixture.id < 0:
            # Frozen for everybody else; here the model is made.
            object.__setattr__(self, "mixture", numbered(self.mixture))
        return self

    @staticmethod
    def sources_of(mixture: NodeConfig) -> list[SourceConfig]:
        """The sources of a tree, depth first."""
        return [source for _, source in walk(mixture, "")]

    @property
    def pick_samples(self) -> int:
        """Samples of one decision of the mixture: a whole global batch with ``batching``, else one."""
        return self.global_batch_size or 1

    @property
    def pick_tokens(self) -> int:
        """Their tokens."""
        return self.sequence_length * self.pick_samples

    def sources_with_paths(self) -> Iterator[tuple[str, SourceConfig]]:
        """Every source with its place in the file, depth first: the order of source ids in a mixture that was never
        revised."""
        yield from walk(self.mixture, "mixture")

    @cached_property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Every source that the run ever had, the dropped ones, too; the position is the source id."""
        sources = [source for _, source in self.sources_with_paths()]
        return tuple(sorted(sources, key=lambda source: source.id))

    @cached_property
    def epochs(self) -> tuple[float, ...]:
        """How often each source is read, by id: its own epochs times those of the nodes above it."""
        by_source: dict[int, float] = {}

        def visit(node: NodeConfig, above: list[float]) -> None:
            for child in node.children:
                factors = [*above, child.epochs]
                if isinstance(child, NodeConfig):
                    visit(child, factors)
                elif any(math.isinf(factor) for factor in factors):
                    by_source[child.id] = math.inf
                else:
                    # As the decimals that they are written as: 3 × 0.1 is not 0.30000000000000004.
                    by_source[child.id] = float(math.prod(Fraction(repr(factor)) for factor in factors))

        visit(self.mixture, [self.mixture.epochs])
        return tuple(by_source[source] for source in range(len(by_source)))

    @cached_property
    def measured_sources(self) -> tuple[int, ...]:
        """The ids of the sources whose size counts: those that end by themselves below a policy that estimates."""

        def below(node: NodeConfig, estimated: bool) -> Iterator[int]:
            for child in node.children:
                if isinstance(child, NodeConfig):
                    yield from below(child, estimated or child.rules.estimates)
                elif estimated and child.presence != "dropped" and not math.isinf(self.epochs[child.id]):
                    yield child.id

        return tuple(sorted(below(self.mixture, self.mixture.rules.estimates)))

    @cached_property
    def nodes(self) -> tuple[NodeConfig, ...]:
        """Every inner node, by id."""

        def below(node: NodeConfig) -> Iterator[NodeConfig]:
            yield node
            for child in node.children:
                if isinstance(child, NodeConfig):
                    yield from below(child)

        return tuple(sorted(below(self.mixture), key=lambda node: node.id))

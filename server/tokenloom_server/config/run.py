"""A run: one validated mixture file, and what follows from its tree."""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import PrivateAttr, model_validator

from tokenloom_server.config.catalog import Catalog, catalog_of
from tokenloom_server.config.node import NodeConfig, descend, numbered, walk
from tokenloom_server.config.run_checks import check_run
from tokenloom_server.config.run_fields import RunFields
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import SourceState, State

#: What ends the first part of a source's name.
_PREFIX = re.compile(r"[/\-_.: ]")


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
        """The sources of a tree, depth first: the order of source ids in a mixture that was never revised."""
        return [source for _, source in walk(mixture, "")]

    @property
    def pick_samples(self) -> int:
        """Samples of one decision of the mixture: a whole global batch with ``batching``, else one."""
        return self.global_batch_size or 1

    @property
    def pick_tokens(self) -> int:
        """Their tokens."""
        return self.sequence_length * self.pick_samples

    def counting(self, count: Literal["real", "positions"]) -> Self:
        """The same run, which counts so where it makes no difference: of joined documents."""
        return (
            self.model_copy(update={"count": count})
            if self.packing == "concat" and not self.batching
            else self
        )

    @property
    def balances_real(self) -> bool:
        """Whether balances leave out the padding of samples. Of joined documents only a source's last one has any."""
        return self.count == "real" and self.packing != "concat" and self.batching is None

    def balanced(self, source: SourceState) -> int:
        """What balances count of a source."""
        return source.real_tokens if self.balances_real else source.tokens

    def consumed(self, state: State) -> tuple[int, ...]:
        """What balances count of each source, by id, without what was passed over."""
        return tuple(
            source.tokens
            - source.skipped_tokens
            - self.balances_real * source.consumed_padding_tokens
            for source in state.sources
        )

    @cached_property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Every source that the run ever had, the dropped ones, too; the position is the source id."""
        return tuple(sorted(self.sources_of(self.mixture), key=lambda source: source.id))

    @cached_property
    def epochs(self) -> tuple[float, ...]:
        """How often each source is read, by id: its own epochs times those of the nodes above it."""
        by_source: dict[int, float] = {}
        for _, child, above in descend(self.mixture, ""):
            if isinstance(child, SourceConfig):
                factors = [*(node.epochs for node in above), child.epochs]
                # As the decimals that they are written as: 3 × 0.1 is not 0.30000000000000004.
                product = (
                    math.inf
                    if math.inf in factors
                    else math.prod(Fraction(repr(factor)) for factor in factors)
                )
                by_source[child.id] = float(product)
        return tuple(by_source[source] for source in range(len(by_source)))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Of each source, by id, the group that people see it in among many: the node below the root that holds it; or
        what other sources' aliases begin with, too; else its own name."""
        alone, by_source = dict[int, str](), dict[int, str]()
        for _, child, above in descend(self.mixture, ""):
            if isinstance(child, SourceConfig) and len(above) > 1:
                by_source[child.id] = above[1].name
            elif isinstance(child, SourceConfig):
                by_source[child.id] = child.name
                alone[child.id] = _PREFIX.split(child.alias or "")[0]
        shared = Counter(alone.values())
        by_source |= {at: name for at, name in alone.items() if name and shared[name] > 1}
        return tuple(by_source[source] for source in range(len(by_source)))

    @cached_property
    def measured_sources(self) -> tuple[int, ...]:
        """The ids of the sources whose size counts: those that end by themselves below a policy that estimates."""
        estimated = [
            child
            for _, child, above in descend(self.mixture, "")
            if isinstance(child, SourceConfig) and any(node.rules.estimates for node in above)
        ]
        ends = [
            of.id
            for of in estimated
            if of.presence != "dropped" and not math.isinf(self.epochs[of.id])
        ]
        return tuple(sorted(ends))

    def ends_with_last_phase(self, left_tokens: int = 0) -> bool:
        """Whether the mixture's ``max_tokens`` stand for the end of the last phase, to the next whole sample, and not
        for what a file says; ``left_tokens``: those that a fork left before it began."""
        ends, most = self.phases[-1].until_tokens if self.phases else None, self.mixture.max_tokens
        return (
            ends is not None
            and most is not None
            and 0 <= most - max(1, ends - left_tokens) < self.pick_tokens
        )

    @cached_property
    def nodes(self) -> tuple[NodeConfig, ...]:
        """Every inner node, by id."""
        nodes = [
            child for _, child, _ in descend(self.mixture, "") if isinstance(child, NodeConfig)
        ]
        return tuple(sorted(nodes, key=lambda node: node.id))

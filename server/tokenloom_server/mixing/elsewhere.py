"""Nodes over sources that were consumed elsewhere, by another run or an older data loader: counters are sums of what
lies below, and each policy says which credits follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenloom_server.config.node import NodeConfig, walk
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import ChildState, SourceState
from tokenloom_server.mixing.mixer import node_shape
from tokenloom_server.mixing.policy import Elsewhere, policy_of

Nodes = tuple[tuple[ChildState, ...], ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """``nodes`` is as in ``State.nodes``. ``baselines``, by source id: at how many tokens the balance of a new source
    (or of the new node around it) begins; None for a source that is not new, or where no policy keeps balances."""

    nodes: Nodes
    baselines: tuple[int | None, ...]


def forked(config: RunConfig, sources: Sequence[SourceState]) -> Nodes:
    """The nodes' states where another run consumed the sources: nobody is owed anything for that."""
    nobody = [0] * len(sources)
    return _summed(
        config,
        sources,
        nobody,
        [True] * len(sources),
        lambda node, sums: policy_of(node).forked(sums),
    )


def imported(
    config: RunConfig,
    sources: Sequence[SourceState],
    balances: Sequence[int],
    known: Sequence[bool],
) -> Imported:
    """The nodes' states where an older data loader consumed the sources. By source id; ``balances``: the tokens that
    count when it is decided who is owed some; ``known``: whether it read the source at all."""
    baselines: list[int | None] = [None] * len(sources)

    def owed_to(node: NodeConfig, sums: Elsewhere) -> Sequence[int]:
        owed, begun = policy_of(node).imported(sums)
        for child, balance, was in zip(node.children, begun or (), sums.known, strict=False):
            if not was:
                # What an inner node noted goes: the outermost balance is the one that a new source waits for.
                for _, source in walk(child, ""):
                    baselines[source.id] = balance
        return owed

    return Imported(_summed(config, sources, balances, known, owed_to), tuple(baselines))


def _summed(
    config: RunConfig,
    sources: Sequence[SourceState],
    balances: Sequence[int],
    known: Sequence[bool],
    owed_to: Callable[[NodeConfig, Elsewhere], Sequence[int]],
) -> Nodes:
    nodes: dict[int, tuple[ChildState, ...]] = {}

    def visit(node: NodeConfig) -> tuple[int, int, int, bool]:
        """Samples, tokens and balances below a node, and whether any of it was read."""
        samples, tokens, counted, read = zip(
            *(
                visit(child)
                if isinstance(child, NodeConfig)
                else (
                    sources[child.id].samples,
                    sources[child.id].tokens,
                    balances[child.id],
                    known[child.id],
                )
                for child in node.children
            ),
            strict=True,
        )
        sums = Elsewhere(
            picks=[count // config.pick_samples for count in samples],
            tokens=counted,
            live=[child.presence == "live" for child in node.children],
            known=read,
            weights=node_shape(config, node).weights,
            baseline=config.new_source_baseline,
        )
        nodes[node.id] = tuple(map(ChildState, samples, tokens, owed_to(node, sums)))
        return sum(samples), sum(tokens), sum(counted), any(read)

    visit(config.mixture)
    return tuple(nodes[number] for number in sorted(nodes))

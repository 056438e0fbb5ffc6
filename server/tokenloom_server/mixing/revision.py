"""What a mixture's nodes have counted and owe, under another mixture of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenloom_server.config import Child, NodeConfig, RunConfig
from tokenloom_server.mixing.credits import carried
from tokenloom_server.mixing.mixer import Mixer
from tokenloom_server.mixing.round_robin import levelled
from tokenloom_server.state import ChildState

#: Their credits mean the same: tokens owed, in 1/W.
_OWING = frozenset({"least_consumed", "soft_sequential", "balance_remaining", "schedule"})

Nodes = tuple[tuple[ChildState, ...], ...]


def carried_nodes(before: RunConfig, nodes: Sequence[Sequence[ChildState]], after: RunConfig) -> Nodes:
    """``State.nodes`` of a state under ``before`` as they are under ``after``, in which every child has its id.

    Counters stay; who joins begins with none owed, and nobody has anything to catch up with. What was out, and may go
    on now because it has new children, more epochs, or a higher limit, is no longer out; sources of the state follow
    (``Mixer.exhausted``).
    """
    known = {
        (node.id, _key(child)): state
        for node, states in zip(before.nodes, nodes, strict=True)
        for child, state in zip(node.children, states, strict=True)
    }
    found = [
        [_resumed(child, known.get((node.id, _key(child)), ChildState()), before, after) for child in node.children]
        for node in after.nodes
    ]
    # A node goes on where a child does, and so upwards.
    while reopened := list(Mixer(after, found).reopened()):
        for node, position in reopened:
            found[node][position] = replace(found[node][position], exhausted=False)
    earlier, later = Mixer(before, nodes).weights(), Mixer(after, found).weights()
    old = {node.id: node for node in before.nodes}
    return tuple(
        _owed(node, old.get(node.id), states, _weights_of(node, old.get(node.id), earlier), later[node.id], after)
        for node, states in zip(after.nodes, found, strict=True)
    )


def _key(child: Child) -> int:
    return 2 * child.id + isinstance(child, NodeConfig)


def _resumed(child: Child, state: ChildState, before: RunConfig, after: RunConfig) -> ChildState:
    """A source that was out, and may now give more: whether it has it, a pick tells."""
    if isinstance(child, NodeConfig) or not state.exhausted:
        return state
    more = after.epochs[child.id] > before.epochs[child.id]
    old = before.sources[child.id].max_tokens
    limited = old is not None and state.tokens + before.sequence_length > old
    higher = limited and (child.max_tokens is None or child.max_tokens >= state.tokens + after.sequence_length)
    return replace(state, exhausted=False) if more or higher else state


def _weights_of(node: NodeConfig, old: NodeConfig | None, weights: dict[int, tuple[int, ...]]) -> list[int]:
    """The weights that the children had in force, 0 for those that were not there."""
    if old is None:
        return [0] * len(node.children)
    had = {_key(child): weight for child, weight in zip(old.children, weights[old.id], strict=True)}
    return [had.get(_key(child), 0) for child in node.children]


def _owed(
    node: NodeConfig,
    old: NodeConfig | None,
    states: Sequence[ChildState],
    before: Sequence[int],
    after: Sequence[int],
    run: RunConfig,
) -> tuple[ChildState, ...]:
    if old is None or old.policy != node.policy:
        # Weights that a policy made are another's no longer.
        states = [replace(state, weight=0, total=0) for state in states]
    own = [state.credit for state in states]
    if node.policy in _OWING:
        same = old is not None and old.policy in _OWING
        if same and before == list(after):
            return tuple(states)
        owed = carried(own, before, after, run.sequence_length) if same else (0,) * len(states)
    elif node.policy == "round_robin":
        if old is None or old.policy != node.policy:
            own, before = [0] * len(states), [0] * len(states)
        samples = [state.samples for state in states]
        owed = levelled(samples, own, [weight > 0 for weight in before], [weight > 0 for weight in after])
    else:
        owed = (0,) * len(states)
    return tuple(replace(state, credit=credit) for state, credit in zip(states, owed, strict=True))

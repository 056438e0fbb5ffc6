"""The state at a sample index, carried over to the config that is in force from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tokenloom_server.config.node import Child, NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import ChildState, SourceState, State, begun_again
from tokenloom_server.mixing.mixer import Mixer
from tokenloom_server.mixing.policy import NodeChange, policy_of
from tokenloom_server.order.mixture_content import child_key
from tokenloom_server.order.returning import Returning

#: Of a child: its node's id, and ``child_key``.
_Key = tuple[int, tuple[type, int]]


def carry(
    state: State,
    old: RunConfig,
    new: RunConfig,
    grown: Sequence[int] = (),
    returning: Sequence[Returning] = (),
) -> State:
    """The state at a sample index, as the config that is in force from there on has it.

    Cursors and counters of sources stay; those of nodes are the sums of what lies below them now. Credits stay in
    their proportions, so that the new shares hold at once. A source that may give more than before (its ids are in
    ``grown`` where it got files) is no longer exhausted. Of sources that come back, what was preserved goes over into
    their own states.
    """
    sources = [_carried(state, old, new, source.id, grown) for source in new.sources]
    for one in returning:
        # A state of another line may know nothing of it, and there it is new.
        if not one.entry or one.entry in state.preserved:
            sources[one.source] = one.carried(sources[one.source])
    preserved = tuple(
        entry for entry in state.preserved if entry not in [one.entry for one in returning]
    )
    before = {
        (node.id, child_key(child)): child_state
        for node, children in zip(old.nodes, state.nodes, strict=True)
        for child, child_state in zip(node.children, children, strict=True)
    }
    old_nodes = {node.id: node for node in old.nodes}
    counted = _counted(new.mixture, sources, before, old_nodes)
    in_force = Mixer(old, state.nodes, clock_offset=state.clock_ahead).weights()
    old_weights = {
        (node.id, child_key(child)): weight
        for node in old.nodes
        for child, weight in zip(node.children, in_force[node.id], strict=True)
    }
    new_weights = Mixer(
        new, [counted[node.id] for node in new.nodes], clock_offset=state.clock_ahead
    ).weights()
    nodes = []
    for node in new.nodes:
        keys = [(node.id, child_key(child)) for child in node.children]
        owed = policy_of(node).revised(
            NodeChange(
                old_policy=policy_of(old_nodes[node.id]) if node.id in old_nodes else None,
                old=[before.get(key) for key in keys],
                new=counted[node.id],
                old_weights=[old_weights.get(key, 0) for key in keys],
                new_weights=new_weights[node.id],
                pick_samples=new.pick_samples,
                pick_tokens=new.pick_tokens,
            )
        )
        children = zip(counted[node.id], owed, strict=True)
        nodes.append(tuple(replace(child, credit=credit) for child, credit in children))
    return replace(state, sources=tuple(sources), nodes=tuple(nodes), preserved=preserved)


def _carried(
    state: State, old: RunConfig, new: RunConfig, source: int, grown: Sequence[int]
) -> SourceState:
    known = state.sources[source] if source < len(old.sources) else SourceState()
    if known.exhausted and (source in grown or _may_give_more(old, new, source)):
        known = replace(known, exhausted=False, dropped_tokens=0)
    if new.packing == "best_fit" and old.sequence_length != new.sequence_length:
        # Its samples would be others: a window of rows that has begun is packed again, from its first row.
        known = begun_again(known)
    return known


def _counted(
    root: NodeConfig,
    sources: Sequence[SourceState],
    before: Mapping[_Key, ChildState],
    old_nodes: Mapping[int, NodeConfig],
) -> dict[int, list[ChildState]]:
    """By node id, its children with the counters of all that lies below them; exhausted where every source there is.
    (One that ended for another reason, and ends again, is noticed by its next pick.)"""
    counted: dict[int, list[ChildState]] = {}

    def is_unchanged(node: NodeConfig) -> bool:
        """Whether each child of a node that did not change is exhausted, or not, as before."""
        return all(
            state.exhausted == before[node.id, child_key(child)].exhausted
            for state, child in zip(counted[node.id], node.children, strict=True)
        )

    def count(child: Child) -> ChildState:
        if isinstance(child, SourceConfig):
            source = sources[child.id]
            return ChildState(source.samples, source.tokens, 0, source.exhausted)
        children = []
        for below in child.children:
            state = count(below)
            known = before.get((child.id, child_key(below)))
            if known is not None and old_nodes[child.id] == child:
                # Nothing changes here: the weights that the policy made stay; and a node's end, if its sources' does.
                ends_as_before = isinstance(below, NodeConfig) and is_unchanged(below)
                exhausted = known.exhausted if ends_as_before else state.exhausted
                state = replace(state, exhausted=exhausted, weight=known.weight, total=known.total)
            children.append(state)
        counted[child.id] = children
        return ChildState(
            sum(state.samples for state in children),
            sum(state.tokens for state in children),
            0,
            all(state.exhausted for state in children),
        )

    count(root)
    return counted


def _may_give_more(old: RunConfig, new: RunConfig, source: int) -> bool:
    if new.epochs[source] > old.epochs[source]:
        return True
    least, most = old.sources[source].max_tokens, new.sources[source].max_tokens
    return least is not None and (most is None or most > least)

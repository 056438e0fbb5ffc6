"""The state at a sample index, carried over to the config that is in force from there on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import ChildState, SourceState, State, begun_again
from tokenloom_server.mixing.mixer import Mixer
from tokenloom_server.mixing.policy import NodeChange, policy_of
from tokenloom_server.order.mixture_content import child_key


def carry(state: State, old: RunConfig, new: RunConfig, grown: Sequence[int] = ()) -> State:
    """The state at a sample index, as the config that is in force from there on has it.

    Cursors and counters of sources stay; those of nodes are the sums of what lies below them now. Credits stay in
    their proportions, so that the new shares hold at once. A source that may give more than before (its ids are in
    ``grown`` where it got files) is no longer exhausted.
    """
    sources = []
    for source in new.sources:
        known = state.sources[source.id] if source.id < len(old.sources) else SourceState()
        if known.exhausted and (source.id in grown or _may_give_more(old, new, source.id)):
            known = replace(known, exhausted=False, dropped_tokens=0)
        if new.packing == "best_fit" and old.sequence_length != new.sequence_length:
            # Its samples would be others: a window of rows that has begun is packed again, from its first row.
            known = begun_again(known)
        sources.append(known)
    before = {
        (node.id, child_key(child)): child_state
        for node, children in zip(old.nodes, state.nodes, strict=True)
        for child, child_state in zip(node.children, children, strict=True)
    }
    known_nodes = {node.id: node for node in old.nodes}
    found: dict[int, list[ChildState]] = {}

    def below(node: NodeConfig) -> ChildState:
        """Counters of all that lies below a node; exhausted where every child of it is. (One that ended for another
        reason, and ends again, is found out by its next pick.)"""
        children = []
        for child in node.children:
            if isinstance(child, NodeConfig):
                children.append(below(child))
            else:
                own = sources[child.id]
                children.append(ChildState(own.samples, own.tokens, 0, own.exhausted))
            was = before.get((node.id, child_key(child)))
            if was is not None and known_nodes[node.id] == node:
                # Nothing changes here: the weights that the policy made stay; and a node's end, if its sources' does.
                ended = was.exhausted if isinstance(child, NodeConfig) and same(child) else children[-1].exhausted
                children[-1] = replace(children[-1], exhausted=ended, weight=was.weight, total=was.total)
        found[node.id] = children
        return ChildState(
            sum(child.samples for child in children),
            sum(child.tokens for child in children),
            0,
            all(child.exhausted for child in children),
        )

    def same(node: NodeConfig) -> bool:
        """Whether each child of a node that did not change is out, or not, as before."""
        return all(
            child.exhausted == before[node.id, child_key(of)].exhausted
            for child, of in zip(found[node.id], node.children, strict=True)
        )

    below(new.mixture)
    in_force = Mixer(old, state.nodes).weights()
    earlier = {
        (node.id, child_key(child)): weight
        for node in old.nodes
        for child, weight in zip(node.children, in_force[node.id], strict=True)
    }
    later = Mixer(new, [found[node.id] for node in new.nodes]).weights()
    nodes = []
    for node in new.nodes:
        keys = [(node.id, child_key(child)) for child in node.children]
        owed = policy_of(node).revised(
            NodeChange(
                old_policy=policy_of(known_nodes[node.id]) if node.id in known_nodes else None,
                old=[before.get(key) for key in keys],
                new=found[node.id],
                old_weights=[earlier.get(key, 0) for key in keys],
                new_weights=later[node.id],
                pick_samples=new.pick_samples,
                pick_tokens=new.pick_tokens,
            )
        )
        nodes.append(tuple(replace(child, credit=own) for child, own in zip(found[node.id], owed, strict=True)))
    return replace(state, sources=tuple(sources), nodes=tuple(nodes))


def _may_give_more(old: RunConfig, new: RunConfig, source: int) -> bool:
    if new.epochs[source] > old.epochs[source]:
        return True
    least, most = old.sources[source].max_tokens, new.sources[source].max_tokens
    return least is not None and (most is None or most > least)

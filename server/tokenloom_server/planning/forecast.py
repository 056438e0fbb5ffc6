"""The plan of a run: from a state, and how much its sources have, to what becomes of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenloom_server.config import RunConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.extents import Extent
from tokenloom_server.plan import PlannedEnding, PlannedSource, PlannedStretch, RunPlan
from tokenloom_server.planning.flow import MAX_STRETCHES, Course, flow
from tokenloom_server.planning.stretches import merged
from tokenloom_server.planning.tree import Branch, Leaf, grow
from tokenloom_server.state import State


def forecast(config: RunConfig, extents: Sequence[Extent], state: State, until: int | None = None) -> RunPlan:
    """What the run will be from a state on, up to ``until`` total tokens or, for None, to its end.

    ``extents`` by source id. Takes no longer for more tokens. Raises ``ConfigError`` for an ``until`` that is not
    beyond the state, and for None where no source ever runs out.
    """
    if until is not None and until <= state.total_tokens:
        raise ConfigError(
            f"tokens: {until} tokens are asked for, but the run has {state.total_tokens} already; the number counts "
            "from the run's beginning: give a larger one"
        )
    length = config.sequence_length
    root, leaves = grow(config, extents, state)
    course = Course(reached=float(state.total_tokens))
    flow(root, leaves, course, math.inf if until is None else float(until), length)
    if course.endless and not course.stretches:
        raise ConfigError(
            "tokens: nothing that the mixture reads ever runs out, so a plan has no end of its own; say how far it "
            "goes, such as 10B"
        )
    end = round(course.reached)
    exhausted = {id(ending.what): round(ending.at) for ending in course.endings}
    return RunPlan(
        run=config.run,
        sequence_length=length,
        from_sample_index=state.sample_index,
        from_tokens=state.total_tokens,
        until_sample_index=state.sample_index + (end - state.total_tokens) // length,
        until_tokens=end,
        ends=root.over,
        reason=_reason(root, leaves, course, end),
        sources=[
            _source(config, extents[leaf.config.id], leaf, state, end, exhausted.get(id(leaf))) for leaf in leaves
        ],
        endings=[
            PlannedEnding(
                tokens=round(ending.at),
                sample_index=state.sample_index + round(ending.at - state.total_tokens) // length,
                name=ending.what.name,
                why=ending.why,
            )
            for ending in course.endings
        ],
        stretches=[
            PlannedStretch(
                from_tokens=round(stretch.begin), until_tokens=round(stretch.end), shares=stretch.shares.tolist()
            )
            for stretch in merged(course.stretches, MAX_STRETCHES)
        ],
    )


def _source(
    config: RunConfig, extent: Extent, leaf: Leaf, state: State, end: int, exhausted_at: int | None
) -> PlannedSource:
    was = state.sources[leaf.config.id]
    tokens = was.tokens + round(leaf.given)
    epoch = extent.tokens
    length = config.sequence_length
    return PlannedSource(
        id=leaf.config.id,
        spec=leaf.config.source,
        alias=leaf.config.name,
        rows=extent.rows,
        tokens_per_row=extent.tokens_per_1000_rows / 1000,
        tokens_per_epoch=epoch,
        epochs=None if math.isinf(leaf.epochs) else leaf.epochs,
        epochs_read=was.rows / extent.rows + leaf.given / epoch if epoch else 0.0,
        tokens=tokens,
        share=tokens / end if end else 0.0,
        exhausted=leaf.out,
        exhausted_at_tokens=exhausted_at,
        exhausted_at_sample=None
        if exhausted_at is None
        else state.sample_index + (exhausted_at - state.total_tokens) // length,
    )


def _reason(root: Branch, leaves: Sequence[Leaf], course: Course, end: int) -> str:
    if course.endless:
        names = ", ".join(leaf.name for leaf in leaves if math.isinf(leaf.left) and not leaf.out)
        return f"nothing ends any more: {names} is read for ever; say how many tokens to plan further"
    if not root.over:
        return f"the run has the {end:,} tokens that were asked for"
    if root.stopped:
        return f"the mixture {root.stopped}"
    if root.waits:
        return "only paused sources are left"
    if all(leaf.out for leaf in leaves):
        return "every source is exhausted"
    return "; ".join(f"{ended.what.name} {ended.why}" for ended in course.endings if isinstance(ended.what, Branch))

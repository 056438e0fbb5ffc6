"""A state as the ledger keeps it."""

from __future__ import annotations

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.ledger.records import CommittedState, Counters
from tokenloom_server.order.timeline import Timeline


def commit_of(timeline: Timeline, state: State, resume_state: str) -> CommittedState:
    """The ledger's view of a state; ``resume_state`` is at the boundary to go forward from. The counters are of what
    was consumed: what a restore jumped over is not in them, but in ``total_tokens``, the order's position."""
    return CommittedState(
        sample_index=state.sample_index,
        total_tokens=state.total_tokens,
        digest=digest_hex(state.digest),
        state=resume_state,
        counters={
            spec: Counters(
                samples=source.samples - source.skipped_samples,
                rows=source.rows - source.skipped_rows,
                tokens=source.tokens - source.skipped_tokens,
            )
            for spec, source in zip(timeline.at(state.sample_index).record.specs, state.sources, strict=True)
        },
    )

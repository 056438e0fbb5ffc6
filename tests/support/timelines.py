"""Courses with revisions, as a server makes them."""

from __future__ import annotations

from typing import Any

from tokenloom_proto.seal import canonical
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.core.state import State
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.order.revision_content import revise
from tokenloom_server.order.segments import skip_content, skips_after
from tokenloom_server.order.timeline import Timeline


def revised(
    timeline: Timeline, sample_index: int, *, state: State | None = None, **change: Any
) -> Timeline:
    """The course under a further revision, made at a ``state``. Raises what ``Timeline.revise`` does."""
    content = revise(
        timeline,
        MixtureChange.model_validate({"reason": "a test", **change}),
        sample_index,
        state=state,
    )
    return _revised(timeline, sample_index, content)


def skipping(
    timeline: Timeline, sample_index: int, samples: int, state: State | None = None
) -> Timeline:
    """The timeline under a further revision that passes over samples; ``state``: and of the skips of before over those
    alone that it passed."""
    passed = (
        timeline.skips
        if state is None
        else {skip.sample_index: skip.samples for skip in state.skips}
    )
    return _revised(
        timeline, sample_index, skip_content(skips_after(passed, sample_index, samples))
    )


def _revised(timeline: Timeline, sample_index: int, content: dict[str, Any]) -> Timeline:
    revision = StoredRevision(
        number=len(timeline.revisions) + 1,
        sample_index=sample_index,
        made_at=0.0,
        author="",
        reason="a test",
        content=canonical(content),
    )
    return timeline.with_revisions((*timeline.revisions, revision))

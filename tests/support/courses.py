"""Courses with revisions, as a server makes them."""

from __future__ import annotations

from typing import Any

from tokenloom_proto.seal import canonical
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.ledger.base import StoredRevision
from tokenloom_server.order.timeline import Course


def revised(course: Course, sample_index: int, **change: Any) -> Course:
    """The course under a further revision. Raises what ``Course.revise`` does."""
    content = course.revise(MixtureChange.model_validate({"reason": "a test", **change}), sample_index)
    revision = StoredRevision(
        number=len(course.revisions) + 1,
        sample_index=sample_index,
        made_at=0.0,
        author="",
        reason="a test",
        content=canonical(content),
    )
    return course.with_revisions((*course.revisions, revision))

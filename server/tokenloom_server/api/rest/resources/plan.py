"""The plan of a run, as figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Body, Query

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import RunName
from tokenloom_server.api.rest.routes import MAX_PLANS, AppBackend, Backend, Routes
from tokenloom_server.config.base import Document
from tokenloom_server.config.mixture_change import MixtureChange, PlannedChange
from tokenloom_server.core.numbers import parse_amount
from tokenloom_server.errors import LimitExceeded
from tokenloom_server.planning.plan import RunPlan
from tokenloom_server.reports.stats import RevisionInfo

ERRORS = (409, 500)
Tokens = Annotated[
    str | None,
    Query(
        description="Plan up to this total of the run's tokens, such as 2000000, 500M, 10B or 1.5T; to the end if not "
        "given, and where there is none for as many as the sources have once.",
        max_length=32,
        examples=["10B"],
    ),
]


class ChangedPlan(Document):
    """A revision that was only tried, and the plan under it."""

    revision: RevisionInfo
    plan: RunPlan


_EXAMPLES = {"pause": {"summary": "A pause", "value": {"set": [{"child": "web", "paused": True}]}}}


ROUTES = Routes()


@contextmanager
def one_plan(backend: Backend, tokens: str | None) -> Iterator[int | None]:
    """While one plan is made: the total of tokens that it goes to. Raises ``LimitExceeded`` where others are made."""
    if not backend.plans.acquire(blocking=False):
        raise LimitExceeded(
            f"{MAX_PLANS} plans are being made, and this server makes no more at once, so that other requests find "
            "a thread; ask again"
        )
    try:
        yield None if tokens is None else parse_amount(tokens, "tokens")
    finally:
        backend.plans.release()


@ROUTES.add("GET", "/v1/runs/{run}/plan", Scope.READ, errors=ERRORS, tags=["runs"])
def read_plan(backend: AppBackend, run: RunName, tokens: Tokens = None) -> RunPlan:
    """The plan of the run.

    From where it is committed: when each source runs out, epochs, shares over the run's tokens, and where it ends.
    Reads a sample of each source the first time, which takes seconds.
    """
    with one_plan(backend, tokens) as until:
        return backend.runs.get(run).plan(until)


@ROUTES.add("POST", "/v1/runs/{run}/plan", Scope.READ, errors=(*ERRORS, 416), tags=["mixture"])
def plan_change(
    backend: AppBackend,
    run: RunName,
    change: Annotated[PlannedChange, Body(openapi_examples=_EXAMPLES)],
    tokens: Tokens = None,
) -> ChangedPlan:
    """The plan under a change of its mixture.

    Changes nothing, so it takes the token for reading. What names files of the server (new sources, rows to leave
    out) is tried by a PATCH of the mixture with `dry_run`.
    """
    fields = {name: getattr(change, name) for name in change.model_fields_set}
    with one_plan(backend, tokens) as until:
        tried = MixtureChange(reason="tried", dry_run=True, **fields)
        revision, plan = backend.runs.get(run).plan_under(tried, until)
    return ChangedPlan(revision=revision, plan=plan)

"""The mixture of a run in force, and the revisions that change it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Path

from tokenloom_server.api import audit
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import RunName
from tokenloom_server.api.rest.routes import AppBackend, Routes
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.reports.stats import MixtureInfo, RevisionInfo

_CHANGE_EXAMPLES = {
    "weight": {
        "summary": "Another weight",
        "value": {"reason": "more code", "author": "ada", "set": [{"child": "code", "weight": 3}]},
    },
    "pause": {
        "summary": "Pause a source from a token count on",
        "value": {
            "reason": "loss spikes",
            "set": [{"child": "web", "paused": True}],
            "total_tokens": 2_000_000_000,
        },
    },
    "new": {
        "summary": "A new source, and one that leaves",
        "value": {
            "reason": "second crawl",
            "add": [{"child": {"source": "parquet:data/crawl2-*.parquet:text", "weight": 2}}],
            "drop": ["crawl1"],
        },
    },
    "take-down": {
        "summary": "Rows to leave out",
        "value": {"reason": "ticket 42", "exclude": {"file": "takedown-42.jsonl"}},
    },
}


ROUTES = Routes()


@ROUTES.add("GET", "/v1/runs/{run}/mixture", Scope.READ, tags=["mixture"])
def read_mixture(backend: AppBackend, run: RunName) -> MixtureInfo:
    """The mixture in force, and what changes it."""
    return backend.runs.get(run).mixture.info()


@ROUTES.add(
    "PATCH", "/v1/runs/{run}/mixture", Scope.CONTROL, errors=(409, 416, 500), tags=["mixture"]
)
def revise(
    backend: AppBackend,
    run: RunName,
    change: Annotated[MixtureChange, Body(openapi_examples=_CHANGE_EXAMPLES)],
) -> RevisionInfo:
    """Change the mixture while the run trains.

    Holds from the next state boundary after all that was produced, while nobody trains from where the run stands,
    or from a later sample index or token count. Journalled before production passes it; snapshots carry it, and a
    restore applies it again at its index.
    """
    served = backend.runs.get(run)
    revision = served.mixture.revise(change)
    if not change.dry_run:
        audit.changed(served, f"revision {audit.revision_text(revision)}", "revision")
    return revision


@ROUTES.add(
    "DELETE",
    "/v1/runs/{run}/mixture/revisions/{number}",
    Scope.CONTROL,
    errors=(416,),
    tags=["mixture"],
)
def drop_revisions(
    backend: AppBackend, run: RunName, number: Annotated[int, Path(ge=1, le=MAX_COUNTER)]
) -> list[RevisionInfo]:
    """Take back a revision, and all after it, before production reaches them."""
    served = backend.runs.get(run)
    dropped = served.mixture.drop(number)
    revisions = ", ".join(map(audit.revision_text, dropped))
    audit.changed(served, f"took back revision {revisions}", "revision")
    return dropped

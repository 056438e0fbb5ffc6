"""Where a run's next generation starts: pinned at a point of its own (restore), or of another run (fork)."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body
from pydantic import ConfigDict, Field

from tokenloom_server.api import audit
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import Model, RunName, SampleIndex
from tokenloom_server.api.rest.routes import AppBackend, Routes
from tokenloom_server.reports.stats import NextLaunch

_POINTS = ("snapshot_id", "sample_index", "snapshot")
_ERRORS = (409, 416, 500)


class RestoreRequest(Model):
    """Exactly one of the first three, and at most one of the others."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [k]} for k in _POINTS]})

    snapshot_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A snapshot that was saved in the ledger."""
    sample_index: SampleIndex | None = None
    """Any sample index from the oldest journalled state up to the horizon."""
    snapshot: Annotated[str, Field(min_length=1)] | None = None
    """A sealed snapshot as a string: what a trainer's ``state_dict()["tokenloom"]`` holds. Or what an older data loader
    saved, as JSON in a string."""

    skip_samples: SampleIndex = 0
    """Samples of the order after that point that are not delivered: a bad range after a loss spike."""
    skip_tokens: SampleIndex = 0
    """The same in tokens, rounded up to whole samples."""
    undo_skip: bool = False
    """Whether skips that the state at that point did not pass are taken back: for a state from beyond a skip that was
    taken without it."""


class ForkRequest(Model):
    """Either ``parent`` or ``snapshot``."""

    parent: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A run of this server."""
    sample_index: SampleIndex | None = None
    """Where the parent stood; null or absent for what it has committed."""
    snapshot: Annotated[str, Field(min_length=1)] | None = None
    """A sealed snapshot of another run as a string: what a trainer's ``state_dict()["tokenloom"]`` holds."""


_SNAPSHOT_EXAMPLE = {
    "summary": "A snapshot out of a checkpoint",
    "value": {"snapshot": '{"checksum":"sha256:…","format_version":1,…}'},
}
_RESTORE_EXAMPLES = {
    "saved": {"summary": "A saved snapshot", "value": {"snapshot_id": "4096-1f9a3c0d72be"}},
    "index": {"summary": "A sample index", "value": {"sample_index": 4096}},
    "skip": {
        "summary": "A sample index, and a range after it that is passed over",
        "value": {"sample_index": 4096, "skip_samples": 512},
    },
    "text": _SNAPSHOT_EXAMPLE,
}
_FORK_EXAMPLES = {
    "run": {
        "summary": "Where a run of this server stood",
        "value": {"parent": "base", "sample_index": 4096},
    },
    "text": _SNAPSHOT_EXAMPLE,
}


ROUTES = Routes()


@ROUTES.add("POST", "/v1/runs/{run}/restore", Scope.CONTROL, errors=_ERRORS, tags=["snapshots"])
def restore(
    backend: AppBackend,
    run: RunName,
    request: Annotated[RestoreRequest, Body(openapi_examples=_RESTORE_EXAMPLES)],
) -> NextLaunch:
    """Pin where the next generation starts.

    Nothing moves until the next trainer opens its generation. One that brings a state of its own must bring this
    one; another is refused with both named. Samples to skip are passed over after it, by that generation and all
    that come there later; they are counted apart, and may take a while: the server goes forward through them.
    """
    served = backend.runs.get(run)
    with audit.pinning(served):
        return served.restores.restore(
            text=request.snapshot, **request.model_dump(exclude={"snapshot"})
        )


@ROUTES.add(
    "DELETE", "/v1/runs/{run}/restore", Scope.CONTROL, errors=(409, 500), tags=["snapshots"]
)
def cancel_restore(backend: AppBackend, run: RunName) -> NextLaunch:
    """Take back what is pinned, and return it.

    The next generation starts where its trainer asks to. Where nothing is pinned, the answer is `NotFound`.
    """
    served = backend.runs.get(run)
    with audit.pinning(served):
        return served.restores.cancel()


@ROUTES.add("POST", "/v1/runs/{run}/fork", Scope.CONTROL, errors=_ERRORS, tags=["snapshots"])
def fork(
    backend: AppBackend,
    run: RunName,
    request: Annotated[ForkRequest, Body(openapi_examples=_FORK_EXAMPLES)],
) -> NextLaunch:
    """Begin a run where another one stands.

    The run must not have begun. Cursors of the sources that both have stay; sample index, tokens and rolling digest
    go on. Nothing moves until the first trainer opens the run, which is to bring no state.
    """
    with audit.pinning(backend.runs.get(run)):
        return backend.runs.fork(
            run, parent=request.parent, sample_index=request.sample_index, text=request.snapshot
        )

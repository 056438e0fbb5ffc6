"""The runs of this server: listed, added, reloaded and removed; and the stats and losses of each."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body
from pydantic import ConfigDict, Field

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import Model, RunName
from tokenloom_server.api.rest.routes import AppBackend, Routes
from tokenloom_server.api.service import Reason
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.reports.stats import (
    BrokenRun,
    ChangedRun,
    RunList,
    RunLosses,
    RunStats,
    RunSummary,
)

_ERRORS = (404, 409, 416, 500, 503)
_NOT_KEPT = "After a restart it is served where the server is started with it."
_ADD_EXAMPLES = {
    "file": {
        "summary": "A mixture file on the server's machine",
        "value": {"file": "/srv/mixtures/wiki.yaml"},
    },
}
_RELOAD_EXAMPLES = {
    "revision": {
        "summary": "What changed is to be a revision",
        "value": {"reason": "more code", "author": "ada"},
    },
}


class ReloadRequest(Model):
    """What a mixture that differs from the one in force is to be."""

    reason: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Why it becomes a revision; without one, a difference is refused."""
    author: Annotated[str, Field(max_length=128)] = ""
    """Who asks for it."""

    def as_reason(self) -> Reason | None:
        return Reason(self.reason, self.author) if self.reason is not None else None


class AddRequest(ReloadRequest):
    """Either ``file`` or ``mixture``."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [k]} for k in ("file", "mixture")]}
    )

    file: Annotated[str, Field(pattern="^/", max_length=4096)] | None = None
    """The path of a mixture file on the server's machine, below its data roots."""
    mixture: Annotated[str, Field(min_length=1)] | None = None
    """The text of a mixture file."""


class Summaries(Model):
    """A few figures of each run."""

    runs: list[RunSummary]
    """By name."""
    unread: dict[str, str]
    """Why the stats of a run cannot be read now, by its name."""


ROUTES = Routes()


@ROUTES.add("GET", "/v1/runs", Scope.READ, errors=(503,), shows_own_runs=True, tags=["runs"])
def list_runs(backend: AppBackend) -> RunList:
    """The runs of this server."""
    names = backend.runs.names()
    broken = [
        BrokenRun(
            run=run, served=run in names, origin=origin.where, error=error.name, message=str(error)
        )
        for run, origin, error in backend.runs.problems()
    ]
    return RunList(
        runs=names, broken=broken, version=backend.version, grpc_address=backend.grpc_address
    )


@ROUTES.add("GET", "/v1/summaries", Scope.READ, errors=(503,), shows_own_runs=True, tags=["runs"])
def read_summaries(backend: AppBackend) -> Summaries:
    """All runs at a glance: state, tokens, rate, ranks and what is wrong."""
    summaries, unread = [], {}
    for name in backend.runs.names():
        try:
            run = backend.runs.get(name)
            summaries.append(RunSummary.of_stats(run.stats.read(), *run.recorder.recent))
        except TokenloomError as error:
            unread[name] = str(error)
    return Summaries(runs=summaries, unread=unread)


@ROUTES.add("POST", "/v1/runs", Scope.ADMIN, errors=_ERRORS, tags=["runs"], status_code=201)
def add_run(
    backend: AppBackend, request: Annotated[AddRequest, Body(openapi_examples=_ADD_EXAMPLES)]
) -> ChangedRun:
    """Add a run, by its mixture file.

    It is served from then on, beside the others; one that the ledger knows goes on where it was. The folder of
    `--runs-dir` gets a link to the file, or one with the text; without a folder only a file is taken, until the
    server ends.
    """
    if (request.file is None) == (request.mixture is None):
        raise ConfigError(
            "a run is added by its mixture file: give file or mixture, one of the two"
        )
    folder = backend.changes.folder
    name = backend.changes.add(request.file, request.mixture, request.as_reason())
    kept = f"It is served again after a restart, as long as it lies in {folder}."
    return ChangedRun(
        run=name, origin=backend.runs.origin(name).where, note=kept if folder else _NOT_KEPT
    )


@ROUTES.add("DELETE", "/v1/runs/{run}", Scope.ADMIN, errors=_ERRORS, tags=["runs"])
def remove_run(backend: AppBackend, run: RunName) -> ChangedRun:
    """Remove a run from this server.

    What is acknowledged is committed, the lease is let go, and trainers end with `NotFound`. The ledger keeps the
    run: added again, it goes on. Its file in the folder of `--runs-dir` is renamed.
    """
    origin = backend.runs.origin(run)
    away = backend.changes.remove(run)
    note = f"Its mixture file is {away} now." if away is not None else _NOT_KEPT
    return ChangedRun(run=run, origin=origin.where, note=note)


@ROUTES.add("POST", "/v1/runs/{run}/reload", Scope.ADMIN, errors=_ERRORS, tags=["runs"])
def reload_run(
    backend: AppBackend,
    run: RunName,
    request: Annotated[ReloadRequest, Body(openapi_examples=_RELOAD_EXAMPLES)],
) -> ChangedRun:
    """Read the mixture file of a run again.

    What differs from the mixture in force becomes a revision, for a reason, or is refused; a run that could not be
    brought up is tried again.
    """
    note = backend.runs.reload(run, request.as_reason())
    return ChangedRun(run=run, origin=backend.runs.origin(run).where, note=note)


@ROUTES.add("GET", "/v1/runs/{run}/stats", Scope.READ, tags=["runs"])
def read_stats(backend: AppBackend, run: RunName) -> RunStats:
    """A run's stats.

    Counters are committed ones: they move when every rank has acknowledged and the ledger holds it.
    """
    return backend.runs.get(run).stats.read()


@ROUTES.add("GET", "/v1/runs/{run}/losses", Scope.READ, tags=["runs"])
def read_losses(backend: AppBackend, run: RunName) -> RunLosses:
    """The losses that trainers reported, by source.

    The means of each report and the tokens that they are of, joined where there are many. This server keeps them in
    its memory: after a restart there are none. The history has losses that outlast it.
    """
    return backend.runs.get(run).losses.read()

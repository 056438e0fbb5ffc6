"""The losses that trainers reported."""

from __future__ import annotations

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import RunName
from tokenloom_server.api.rest.routes import Backend, Routes
from tokenloom_server.reports.stats import RunLosses


def add_routes(routes: Routes, backend: Backend) -> None:
    @routes.add("GET", "/v1/runs/{run}/losses", Scope.READ, errors=(404, 422, 503), tags=["runs"])
    def read_losses(run: RunName) -> RunLosses:
        """The losses that trainers reported, by source.

        A curve over the run, of some hundreds of points however long it is. This server keeps it in its memory: after a
        restart it is empty.
        """
        return backend.runs.get(run).losses.read()

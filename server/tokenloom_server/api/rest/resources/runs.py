"""The runs of this server, and the stats of each."""

from __future__ import annotations

from pydantic import Field

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import Model, RunName
from tokenloom_server.api.rest.routes import Backend, Routes
from tokenloom_server.reports.stats import RunStats


class RunList(Model):
    runs: list[str] = Field(examples=[["wiki-and-code"]])
    """Names, as in the mixture files."""
    version: str = Field(examples=["0.1.0"])
    """The server's version."""
    grpc_address: str | None = Field(examples=["127.0.0.1:50051"])
    """Where trainers connect; null where that is not known."""


def add_routes(routes: Routes, backend: Backend) -> None:
    @routes.add("GET", "/v1/runs", Scope.READ, errors=(503,), tags=["runs"])
    def list_runs() -> RunList:
        """The runs of this server."""
        return RunList(runs=backend.runs.names(), version=backend.version, grpc_address=backend.grpc_address)

    @routes.add("GET", "/v1/runs/{run}/stats", Scope.READ, errors=(404, 422, 503), tags=["runs"])
    def read_stats(run: RunName) -> RunStats:
        """A run's stats.

        Counters are committed ones: they move when every rank has acknowledged and the ledger holds it.
        """
        return backend.runs.get(run).stats.read()

"""The app: a tuple of resources, each of which adds its routes, and what stands in front of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from fastapi import Depends, FastAPI

from tokenloom_server.api import page
from tokenloom_server.api.rest.guard import Guard
from tokenloom_server.api.rest.problems import add_error_handlers
from tokenloom_server.api.rest.resources import (
    health,
    history,
    metrics,
    mixture,
    plan,
    receipts,
    restore,
    runs,
    snapshots,
    trace,
)
from tokenloom_server.api.rest.routes import Backend, Routes, refuse_unknown_parameters

#: Each has ``add_routes(routes, backend)``. A new resource is its module, and its name here.
RESOURCES = (runs, history, plan, receipts, snapshots, restore, trace, mixture, health, metrics, page)


class RestApp(FastAPI):
    """The app with its ``routes``, which know the scope that each asks for."""

    def __init__(self, version: str) -> None:
        super().__init__(
            title="Tokenloom",
            version=version,
            summary="Stats, snapshots and restore of training runs' data.",
            description='Every error is `{"error": name, "message": text}`. POST requests must carry '
            "`Content-Type: application/json`, with or without a body.",
            docs_url=None,  # both load their scripts from elsewhere, which a cluster without internet cannot
            redoc_url=None,
            redirect_slashes=False,
            dependencies=[Depends(refuse_unknown_parameters)],
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        )
        self.resource_routes = Routes(self)

    def openapi(self) -> dict[str, Any]:
        """The schema, with the kind of token that its routes refer to."""
        schema = super().openapi()
        schema["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer", "description": "Where the server was started with a token."}
        }
        return schema


def create_app(backend: Backend, resources: Sequence[ModuleType] = RESOURCES) -> RestApp:
    """The REST interface to the runs of ``backend``, with its own metrics registry."""
    app = RestApp(backend.version)
    for resource in resources:
        resource.add_routes(app.resource_routes, backend)
    add_error_handlers(app)
    app.add_middleware(Guard, access=backend.access, needed_by=app.resource_routes.needed_by)
    return app

"""The app: the routes of its resources, the files of the page, and what stands in front of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope as RequestScope

from tokenloom_server.api.auth import Needed, Scope
from tokenloom_server.api.page import page_files
from tokenloom_server.api.rest.guard import Guard
from tokenloom_server.api.rest.problems import add_error_handlers
from tokenloom_server.api.rest.resources import (
    health,
    history,
    metrics,
    mixture,
    plan,
    restore,
    runs,
    snapshots,
)
from tokenloom_server.api.rest.routes import Backend, Routes, refuse_unknown_parameters

#: Each has ``ROUTES``. A new resource of the service is its module, and its name here.
RESOURCES = (runs, history, plan, snapshots, restore, mixture, health, metrics)


class RestApp(FastAPI):
    """The REST interface to the runs of a backend."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(
            title="Tokenloom",
            version=backend.version,
            summary="Stats, snapshots and restore of training runs' data.",
            description='Every error is `{"error": name, "message": text}`. POST requests must carry '
            "`Content-Type: application/json`, with or without a body.",
            docs_url=None,  # both load their scripts from elsewhere, which a cluster without internet cannot
            redoc_url=None,
            redirect_slashes=False,
            dependencies=[Depends(refuse_unknown_parameters)],
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        )
        self.state.backend = backend
        #: By method and path. FastAPI adds the route of the schema itself.
        self.scopes: dict[tuple[str, str], Scope] = {("GET", "/openapi.json"): Scope.READ}
        #: Those that are about all runs: closed to a token that is good for some.
        self.of_all_runs: set[tuple[str, str]] = set()

    def openapi(self) -> dict[str, Any]:
        """The schema, with the kind of token that its routes refer to."""
        schema = super().openapi()
        schema["components"]["securitySchemes"] = {
            "token": {
                "type": "http",
                "scheme": "bearer",
                "description": "Where the server was started with a token.",
            }
        }
        return schema

    def add_resource(self, routes: Routes) -> None:
        routes.add_to(self)
        self.scopes |= routes.scopes
        self.of_all_runs |= routes.of_all_runs

    def add_file(self, path: str, content: bytes, media_type: str) -> None:
        """A file of the page, open to all and not part of the schema."""
        self.scopes["GET", path] = Scope.OPEN

        async def serve(request: Request) -> Response:
            return Response(content, media_type=media_type)

        self.add_route(path, serve, methods=["GET"], include_in_schema=False)

    def needed_by(self, request: RequestScope) -> Needed:
        """What the route of a request asks for. Where there is no such route, only a reader learns that."""
        for route in self.routes:
            match, details = route.matches(request)
            if match is Match.FULL:
                method = "GET" if request["method"] == "HEAD" else request["method"]
                key = method, getattr(route, "path", "")
                run = None if key in self.of_all_runs else details["path_params"].get("run", "")
                return Needed(self.scopes.get(key, Scope.ADMIN), run)
        return Needed(Scope.READ)


def create_app(
    backend: Backend, routes: Sequence[Routes] = (), only_health: bool = False
) -> RestApp:
    """The REST interface to the runs of ``backend``. ``routes``: those of tools, beside the service's own.
    ``only_health``: without all that is for people and tools."""
    app = RestApp(backend)
    for resource in (health,) if only_health else RESOURCES:
        app.add_resource(resource.ROUTES)
    for each in () if only_health else routes:
        app.add_resource(each)
    for file in () if only_health else page_files():
        app.add_file(*file)
    add_error_handlers(app)
    app.add_middleware(Guard, access=backend.access, needed_by=app.needed_by)
    return app

"""The metrics of all runs, for Prometheus."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.routes import AppBackend, Routes

ROUTES = Routes()


@ROUTES.add(
    "GET",
    "/metrics",
    Scope.READ,
    errors=(503,),
    tags=["health"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(backend: AppBackend, request: Request) -> Response:
    """The metrics for Prometheus."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(
        encode(backend.registry), media_type=None, headers={"content-type": content_type}
    )

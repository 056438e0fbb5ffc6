"""Whether the process is alive, and whether it can serve requests."""

from __future__ import annotations

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tokenloom_server.api.auth import Access, Scope
from tokenloom_server.api.rest.models import Model
from tokenloom_server.api.rest.routes import AppBackend, Routes
from tokenloom_server.errors import TokenloomError

_REASON_WITHHELD = (
    "this server is not ready; its log says why, and so does this route to a caller with a token"
)


class Alive(Model):
    status: str = Field(examples=["alive"])
    version: str = Field(examples=["0.1.0"])
    server: str = Field(examples=["0123456789abcdef0123456789abcdef"])
    """Which process answers; gRPC's health knows a service of this name."""


class Ready(Model):
    status: str = Field(examples=["ready"])


ROUTES = Routes()


@ROUTES.add("GET", "/healthz", Scope.OPEN, tags=["health"])
async def healthz(backend: AppBackend) -> Alive:
    """Is the process alive?"""
    # On the event loop, not in a worker thread: it answers while every worker waits for the ledger.
    return Alive(status="alive", version=backend.version, server=backend.runs.identity)


@ROUTES.add("GET", "/readyz", Scope.OPEN, errors=(503,), tags=["health"])
async def readyz(backend: AppBackend, request: Request) -> Ready:
    """Can requests be served?"""
    # On the event loop, too: it asks nothing of the ledger.
    reason = backend.runs.not_ready()
    if reason is not None:
        # Whether is for everybody, why is not: it names runs, machines and files.
        raise HTTPException(503, reason if _may_read(backend.access, request) else _REASON_WITHHELD)
    return Ready(status="ready")


def _may_read(access: Access, request: Request) -> bool:
    try:
        access.check(request.headers.get("authorization"), Scope.READ, None)
    except TokenloomError:
        return False
    return True

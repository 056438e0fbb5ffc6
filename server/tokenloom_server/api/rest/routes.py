"""How a resource declares its routes: each with the scope that it asks for and the errors that it may answer with."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tokenloom_server.api.auth import OPEN_TO_ALL, Access, Scope
from tokenloom_server.api.metrics import create_registry
from tokenloom_server.api.rest.guard import MAX_BODY_BYTES
from tokenloom_server.api.rest.models import ErrorBody
from tokenloom_server.api.rest.problems import quoted
from tokenloom_server.api.run_folder import RunFolder
from tokenloom_server.api.served_run import Companions
from tokenloom_server.api.service import Runs
from tokenloom_server.config.data_roots import DataRoots

#: Plans at once: the first of a run reads from storage, and each waits in a thread that other requests need.
MAX_PLANS = 4
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
#: What an error status means, for OpenAPI.
_MEANINGS = {
    401: "`Unauthenticated`: no token, or another.",
    403: "`OriginRefused`: a browser sent this for a page of another host. `Forbidden`: the token has a lower scope.",
    404: "No such run or snapshot.",
    409: "The run is in a state that does not allow this, such as `SourceChanged`.",
    413: f"`BodyTooLarge`: more than {MAX_BODY_BYTES} bytes.",
    415: "`ContentTypeRequired`: a POST without `Content-Type: application/json`.",
    416: "`BeyondHorizon`: that sample has not been and may not yet be produced, or its state is gone.",
    421: "`HostRefused`: the Host header is not a name of this server.",
    422: "A field is not what is expected, or the snapshot is refused (`InvalidRequest`, `SnapshotInvalid`).",
    429: "`TooManyPeeks`: as many look at the run as a server makes samples for at once; try again.",
    500: "A source, the tokeniser or the server failed.",
    503: "The ledger cannot be reached, another server leads, or this one is starting or stopping.",
}
#: What ``Guard`` and ``refuse_unknown_parameters`` answer, whatever the route is.
_OF_EVERY_ROUTE = (403, 421, 422)
#: What ``Guard`` answers where there may be a body, and what ``Runs.get`` does.
_OF_A_BODY, _OF_A_RUN = (413, 415), (404, 503)


async def refuse_unknown_parameters(request: Request) -> None:
    """Raises ``HTTPException`` where an address has a parameter that its route does not take: a typo would change
    nothing, and nobody would notice."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            meant = "".join(f"; did you mean {near}?" for near in get_close_matches(name, known, 1))
            expected = f"expected one of {', '.join(known)}" if known else "this route takes none"
            raise HTTPException(
                422, f"query: found the unknown parameter {quoted(name)}; {expected}{meant}"
            )


@dataclass(frozen=True)
class Backend:
    """What resources answer from."""

    runs: Runs
    version: str
    """Of the server."""
    grpc_address: str | None = None
    """Where trainers connect, for people who have none yet."""
    access: Access = OPEN_TO_ALL
    folder: RunFolder | None = None
    """How runs are added and removed; none that is followed if not given."""
    plans: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(MAX_PLANS)
    )
    """Held by each plan that is being made."""

    @cached_property
    def companion(self) -> Companions:
        """What tools keep for this server."""
        return Companions(self)

    @cached_property
    def changes(self) -> RunFolder:
        """Adds and removes runs: with the folder that is followed, or until the server ends."""
        return self.folder or RunFolder(self.runs, None, None, DataRoots())

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The metrics."""
        return create_registry(
            self.runs, version=self.version, access=self.access, folder=self.folder
        )


async def _app_backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


#: A route's parameter for the backend of the app that it is in.
AppBackend = Annotated[Backend, Depends(_app_backend)]


class Routes:
    """The routes of a resource, and the scope that each asks for."""

    def __init__(self) -> None:
        self._add_to: list[Callable[[FastAPI], None]] = []
        #: By method and path.
        self.scopes: dict[tuple[str, str], Scope] = {}
        #: Those that are about all runs: closed to a token that is good for some.
        self.of_all_runs: set[tuple[str, str]] = set()

    def add(
        self,
        method: str,
        path: str,
        scope: Scope,
        *,
        errors: tuple[int, ...] = (),
        shows_own_runs: bool = False,
        responses: Mapping[int | str, dict[str, Any]] | None = None,
        **documented: Any,
    ) -> Callable[[_Endpoint], _Endpoint]:
        """Decorates the function that answers on a route. The first line of its docstring is the route's summary in
        OpenAPI, the rest its description. ``errors``: the statuses that it may answer with, besides those that follow
        from its method and path. ``shows_own_runs``: a path without a run that shows each caller only the runs that its
        token is good for; the others take a token for all runs. ``documented``: what else FastAPI's ``add_api_route``
        takes, such as tags."""
        self.scopes[method, path] = scope
        statuses = {*_OF_EVERY_ROUTE, *errors}
        if method != "GET":
            statuses |= {*_OF_A_BODY}
        if "{run}" in path:
            statuses |= {*_OF_A_RUN}
        elif scope is not Scope.OPEN and not shows_own_runs:
            self.of_all_runs.add((method, path))
        if scope is not Scope.OPEN:
            statuses.add(401)
            documented["openapi_extra"] = {"security": [{"token": [scope.name.lower()]}]}
        answers: dict[int | str, dict[str, Any]] = {**(responses or {})}
        for status in sorted(statuses):
            answers[status] = {"model": ErrorBody, "description": _MEANINGS[status]}

        def add(endpoint: _Endpoint) -> _Endpoint:
            summary, _, description = (inspect.getdoc(endpoint) or "").partition("\n\n")
            # In place of an empty description FastAPI would repeat the docstring; at a form feed it ends one.
            self._add_to.append(
                lambda app: app.add_api_route(
                    path,
                    endpoint,
                    methods=[method],
                    summary=summary.removesuffix("."),
                    description=description.replace("\n", " ") or "\f",
                    responses=answers,
                    **documented,
                )
            )
            return endpoint

        return add

    def add_to(self, app: FastAPI) -> None:
        for add in self._add_to:
            add(app)

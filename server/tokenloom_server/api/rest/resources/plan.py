"""The plan of a run: as figures, and as a picture."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import RunName
from tokenloom_server.api.rest.routes import Backend, Routes
from tokenloom_server.core.amounts import parse_amount
from tokenloom_server.errors import LimitExceeded
from tokenloom_server.planning.picture import draw
from tokenloom_server.planning.plan import RunPlan

#: Plans at once: the first of a run reads from storage, and each waits in a thread that other requests need.
MAX_PLANS = 4
#: A picture's colours are styles within it; it needs nothing else, and no script.
_PICTURE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
_ERRORS = (404, 409, 422, 500, 503)
Tokens = Annotated[
    str | None,
    Query(
        description="Plan up to this total of the run's tokens, such as 2000000, 500M, 10B or 1.5T; to the end if not "
        "given, and where there is none for as many as the sources have once.",
        max_length=32,
        examples=["10B"],
    ),
]


def add_routes(routes: Routes, backend: Backend) -> None:
    free = threading.BoundedSemaphore(MAX_PLANS)
    drawing = threading.Lock()

    @contextmanager
    def planned(run: str, tokens: str | None) -> Iterator[RunPlan]:
        if not free.acquire(blocking=False):
            raise LimitExceeded(
                f"{MAX_PLANS} plans are being made, and this server makes no more at once, so that other requests find "
                "a thread; ask again"
            )
        try:
            until = None if tokens is None else parse_amount(tokens, "tokens")
            yield backend.runs.get(run).plan(until)
        finally:
            free.release()

    @routes.add("GET", "/v1/runs/{run}/plan", Scope.READ, errors=_ERRORS, tags=["runs"])
    def read_plan(run: RunName, tokens: Tokens = None) -> RunPlan:
        """What the run will be.

        From where it is committed: when each source runs out, epochs, shares over the run's tokens, and where it ends.
        Reads a sample of each source the first time, which takes seconds.
        """
        with planned(run, tokens) as plan:
            return plan

    @routes.add(
        "GET",
        "/v1/runs/{run}/plan.svg",
        Scope.READ,
        errors=_ERRORS,
        tags=["runs"],
        response_class=Response,
        responses={
            200: {"content": {"image/svg+xml": {"schema": {"type": "string"}}}, "description": "The picture."},
        },
    )
    def draw_plan(run: RunName, tokens: Tokens = None) -> Response:
        """The plan as a picture.

        Stacked shares over the run's tokens. Needs `pip install 'tokenloom[plot]'` at the server.
        """
        # matplotlib's settings are the process's: one picture at a time.
        with planned(run, tokens) as plan, drawing:
            picture = draw(plan, "svg")
        return Response(picture, media_type="image/svg+xml", headers=_PICTURE_HEADERS)

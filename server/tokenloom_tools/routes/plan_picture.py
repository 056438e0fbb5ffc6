"""The plan of a run, as a picture."""

from __future__ import annotations

import threading

from starlette.responses import Response
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import RunName
from tokenloom_server.api.rest.resources.plan import ERRORS, Tokens, one_plan
from tokenloom_server.api.rest.routes import AppBackend, Backend, Routes
from tokenloom_server.planning.plan import RunPlan

from tokenloom_tools.plan.picture import draw

#: A picture's colours are styles within it; it needs nothing else, and no script.
_PICTURE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
}
ROUTES = Routes()


class Pictures:
    """One picture at a time: matplotlib's settings are the process's."""

    def __init__(self, backend: Backend) -> None:
        self._drawing = threading.Lock()

    def draw(self, plan: RunPlan) -> bytes:
        """As SVG. Raises ``ConfigError`` without matplotlib."""
        with self._drawing:
            return draw(plan, "svg")


@ROUTES.add(
    "GET",
    "/v1/runs/{run}/plan.svg",
    Scope.READ,
    errors=ERRORS,
    tags=["runs"],
    response_class=Response,
    responses={
        200: {
            "content": {"image/svg+xml": {"schema": {"type": "string"}}},
            "description": "The picture.",
        }
    },
)
def draw_plan(backend: AppBackend, run: RunName, tokens: Tokens = None) -> Response:
    """The plan as a picture.

    Stacked shares over the run's tokens. Needs `pip install 'tokenloom[plot]'` at the server.
    """
    with one_plan(backend, tokens) as until:
        picture = backend.companion(Pictures).draw(backend.runs.get(run).plan(until))
    return Response(picture, media_type="image/svg+xml", headers=_PICTURE_HEADERS)

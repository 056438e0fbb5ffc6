"""The page at ``/``: static files that ask the REST interface for a run's figures once a second.

The files are read once, when the app is made, and named one by one: a request never becomes a path.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

#: URL → (file in this package, media type).
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}


def page_routes() -> list[Route]:
    """One route per file."""
    return [_route(url, name, media_type) for url, (name, media_type) in FILES.items()]


def _route(url: str, name: str, media_type: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return Route(url, serve, methods=["GET"], include_in_schema=False)

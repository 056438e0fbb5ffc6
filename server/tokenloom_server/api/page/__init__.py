"""The page at ``/``: static files that ask the REST interface for a run's stats once a second.

The files are read once, when the app is made, and named one by one: a request never becomes a path.
"""

from __future__ import annotations

from importlib.resources import files

from tokenloom_server.api.rest.routes import Backend, Routes

#: URL → (file in this package, media type).
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}


def add_routes(routes: Routes, backend: Backend) -> None:
    for url, (name, media_type) in FILES.items():
        routes.add_file(url, files(__name__).joinpath(name).read_bytes(), media_type)

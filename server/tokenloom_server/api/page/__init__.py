"""The page at ``/``: static files that ask the REST interface for a run's stats once a second.

The files are listed once, and read when the app is made: a request never becomes a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import PurePath

#: What is served of this package, by how a file's name ends.
_MEDIA_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_files() -> Iterator[tuple[str, bytes, str]]:
    """Each file's URL, content and media type."""
    page = files(__name__)
    # https://github.com/leeoniya/uPlot 1.6.32, MIT, its files as they are published.
    for url, folder in (("/page", page), ("/page/uplot", page.joinpath("uplot"))):
        for file in folder.iterdir():
            media_type = _MEDIA_TYPES.get(PurePath(file.name).suffix)
            if media_type is not None:
                yield (
                    "/" if file.name == "index.html" else f"{url}/{file.name}",
                    file.read_bytes(),
                    media_type,
                )

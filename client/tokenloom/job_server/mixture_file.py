"""A path to a mixture file in a URL's place: how it is recognised, and what has to be installed to serve it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

SUFFIXES = (".yaml", ".yml")
#: Of the server's extra: enough to tell whether that is installed.
_NEEDED = ("fastapi", "pyarrow", "pydantic", "typer", "xxhash", "yaml")


def mixture_path(url: str | os.PathLike[str]) -> Path | None:
    """The mixture file that ``url`` is; None for an address. A text is a file where it ends like one."""
    if isinstance(url, str) and ("://" in url or not url.lower().endswith(SUFFIXES)):
        return None
    return Path(url)


def require_server(mixture: Path, needed: Iterable[str] = _NEEDED) -> None:
    """Raises ``ModuleNotFoundError`` where the server's packages are not installed beside the client."""
    missing = [name for name in needed if find_spec(name) is None]
    if missing or sys.version_info < (3, 11):
        lack = (
            f"Python {sys.version_info.major}.{sys.version_info.minor}"
            if not missing
            else f"no {missing[0]!r}"
        )
        raise ModuleNotFoundError(
            f"{str(mixture)!r} is a mixture file, so the server would be started here, and there is {lack}: the "
            "server wants Python 3.11 or newer and its packages, pip install 'tokenloom[server]'. Or give the address "
            "of a server that runs elsewhere, grpc://HOST:PORT/RUN"
        )

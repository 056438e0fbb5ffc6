"""The columns of a file and what each holds, before a spec says what is read of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.scheme import Scheme
from tokenloom_server.storage.open import open_file
from tokenloom_server.storage.urls import is_remote


def columns_of(scheme: Scheme, path: str, base_dir: Path) -> Mapping[str, Content | None]:
    """Names in the order of a file, by its path or URL; None for what is neither text nor lists of integers.

    Raises ``SourceError`` naming a file that cannot be read as one of the scheme.
    """
    try:
        with open_file(path, base_dir) as file:
            return scheme.columns(file, path)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        shown = path if is_remote(path) else str(base_dir / path)
        raise SourceError(f"{shown!r} cannot be read as {scheme.name} ({type(error).__name__}: {error})") from None

"""Opens a file, local or remote."""

from __future__ import annotations

import os
from pathlib import Path

from tokenloom_server.storage.file import File
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.local import LocalFile
from tokenloom_server.storage.remote import RemoteFile, cached_copy
from tokenloom_server.storage.urls import is_remote


def open_file(path: str, base_dir: Path, name: str = "", io_stats: IoStats | None = None) -> File:
    """Opens a file by its path (relative to ``base_dir``) or URL. ``name`` is how messages call it.

    Raises ``OSError`` (``FileNotFoundError`` among them) for a file that is not there, or on this machine may not be
    read, and ``StorageError`` where storage refuses it or does not answer.
    """
    name = name or repr(path)
    if is_remote(path):
        cached = cached_copy(path)
        return (
            RemoteFile(path, name, io_stats or IoStats())
            if cached is None
            else LocalFile(cached, name)
        )
    return LocalFile(os.path.join(base_dir, path), name)  # noqa: PTH118  # a Path for each of many files costs more

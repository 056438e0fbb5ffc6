"""Opening a file, wherever it lies."""

from __future__ import annotations

from pathlib import Path

from tokenloom_server.storage.file import File
from tokenloom_server.storage.local import LocalFile
from tokenloom_server.storage.remote import RemoteFile
from tokenloom_server.storage.traffic import Traffic
from tokenloom_server.storage.urls import is_remote


def open_file(path: str, base_dir: Path, name: str = "", traffic: Traffic | None = None) -> File:
    """Opens a file by its path (relative to ``base_dir``) or URL. ``name`` is how messages call it.

    Raises ``OSError`` (``FileNotFoundError`` among them) for a file that is not there or may not be read, and
    ``StorageError`` where storage does not answer.
    """
    name = name or repr(path)
    if is_remote(path):
        return RemoteFile(path, name, traffic or Traffic())
    return LocalFile(base_dir / path, name)

"""Files that appear under their name whole or not at all, even where the machine fails meanwhile; their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import xxhash


def draft_of(path: Path) -> Path:
    """Where a file is written until it is whole: beside ``path``, hidden, with the ending ``.draft``."""
    return path.with_name(f".{path.name}.draft")


def publish(draft: Path, path: Path) -> None:
    """Brings a draft to disk, then gives it its name. Raises ``OSError``."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Writes a file of text as a draft, and publishes it. Raises ``OSError``."""
    draft = draft_of(path)
    draft.write_text(text, encoding="utf-8")
    publish(draft, path)


def checksum(path: Path) -> str:
    """``xxh3:`` and the XXH3-128 of a file's bytes as hexadecimal digits. Raises ``OSError``."""
    with path.open("rb", buffering=0) as file:
        return f"xxh3:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"

"""Endings of file names: the kind of content, and after it the compression."""

from __future__ import annotations

from pathlib import Path

#: The ending of each compression, and its name.
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}


def codec_of(path: str) -> str | None:
    """The compression of a file by its name; None where it has none."""
    return CODECS.get("".join(path.lower().rpartition(".")[1:]))


def ending_of(name: str) -> str:
    """What the name of a file ends with: ``.jsonl``, or ``.jsonl.gz`` where it is compressed."""
    path = Path(name)
    return f"{Path(path.stem).suffix}{path.suffix}" if codec_of(name) is not None else path.suffix

"""What names of files end with: the kind of content, and after it what it is compressed by."""

from __future__ import annotations

from pathlib import Path

#: What names end with, and how Arrow calls what they are compressed by.
CODECS = {".gz": "gzip", ".zst": "zstd"}


def codec_of(path: str) -> str | None:
    """What a file is compressed by, as its name says; None where it is not."""
    return next((codec for ending, codec in CODECS.items() if path.lower().endswith(ending)), None)


def ending_of(name: str) -> str:
    """What the name of a file ends with: ``.jsonl``, or ``.jsonl.gz`` where it is compressed."""
    path = Path(name)
    return f"{Path(path.stem).suffix}{path.suffix}" if codec_of(name) is not None else path.suffix

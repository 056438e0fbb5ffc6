"""Folders that Mosaic streaming itself writes."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def mosaic() -> Any:
    """The package ``streaming``, without its parts for images, which need torchvision, and for text of its own."""
    for part in ("streaming.vision", "streaming.text"):
        sys.modules.setdefault(part, types.ModuleType(part))
    import streaming

    return streaming


def write_mds(
    folder: Path, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], **options: Any
) -> None:
    """A folder of shards, one sample for each row; ``options`` are those of ``MDSWriter``."""
    with mosaic().MDSWriter(out=str(folder), columns=dict(columns), **options) as writer:
        for row in rows:
            writer.write(row)


def merge_folders(folder: Path) -> None:
    """Writes an index for the folders of shards below a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files open
        mosaic().base.util.merge_index(str(folder), keep_local=True)

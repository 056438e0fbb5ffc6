"""Folders that LitData itself writes and reads."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_litdata(
    folder: Path, items: Iterable[Any], *, tokens: bool = False, **options: Any
) -> None:
    """A folder of chunks, one sample for each item; ``tokens``: as a stream of ids. ``options`` are those of the writer
    that ``litdata.optimize`` has in each process."""
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    options.setdefault("chunk_size", 10)
    writer = BinaryWriter(str(folder), item_loader=TokensLoader() if tokens else None, **options)
    for i, item in enumerate(items):
        writer[i] = item
    writer.done()
    writer.merge()


def read_litdata(folder: Path) -> list[Any]:
    """All samples of a folder, but for streams of ids, as the library gives them; it makes compressed chunks plain."""
    from litdata import StreamingDataset

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # it leaves files open, and gives tensors of memory that is not writable
        dataset = StreamingDataset(str(folder))
        samples = [dataset[i] for i in range(len(dataset))]
        del dataset
        gc.collect()
    return samples

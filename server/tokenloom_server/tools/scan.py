"""Every row of a run's sources, read once: which of them are bad."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np

from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.sources.files import in_threads

#: Bad rows of a file whose reasons are kept.
LISTED_ROWS = 20


class Scanned(NamedTuple):
    """How many rows a file has, and what is wrong with the first bad ones."""

    rows: int
    bad: int
    filtered: int
    reasons: list[str]


def scan(order: PipelineFactory, on_rows: Callable[[int, int, int], None]) -> list[Scanned]:
    """Reads each file as a run does, up to its tokens. ``on_rows`` is called with rows, their tokens, and the bytes of
    files that are done, from any thread. Raises ``SourceError`` where a file cannot be read on."""

    def scan_file(file: tuple[int, int]) -> Scanned:
        source, shard = file
        rows, counts, reasons = 0, np.zeros(2, np.int64), list[str]()
        for part in order.documents(source).read_part(shard, 0, sys.maxsize):
            rows += len(part.ends)
            counts += part.bad_and_filtered
            reasons += islice(part.reasons.values(), LISTED_ROWS - len(reasons))
            on_rows(len(part.ends), len(part.ids), 0)
        on_rows(0, 0, order.record.shards[source][shard].size)
        return Scanned(rows, int(counts[0]), int(counts[1]), reasons)

    shards = enumerate(order.record.shards)
    return in_threads(scan_file, [(source, shard) for source, own in shards for shard in range(len(own))])

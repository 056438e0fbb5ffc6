"""Rows of a run's sources as it reads them: which of them are bad, every row once or as many of all files as bounds
allow; and what of plain text is a document."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from time import monotonic
from typing import NamedTuple

import numpy as np
from tokenloom_server.errors import SourceError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.documents import Documents
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.columns import byte_sizes
from tokenloom_server.sources.files import codec_of, in_threads
from tokenloom_server.sources.lines import LinesSource
from tokenloom_server.sources.scheme import scheme_of
from tokenloom_server.sources.schemes import FILE, PARAGRAPH, TEXT_COLUMN, TxtScheme

#: Bad rows of a file whose reasons are kept.
LISTED_ROWS = 20
#: About so much is read of a file's beginning where not all of it is read. Of its end so many bytes of lines, or rows.
PART_BYTES, END_BYTES, END_ROWS = 1 << 20, 1 << 16, 64
#: Sources that are held open.
OPEN_SOURCES = 64


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
    return in_threads(
        scan_file, [(source, shard) for source, own in shards for shard in range(len(own))]
    )


def look(order: PipelineFactory, seconds: float, most_bytes: int) -> tuple[str, list[str]]:
    """What may be said of all files, and notes on what was met and not read.

    Reads a file of each source, then others that are evenly spread, of each its beginning and its end; then, in the
    same order, whole files. Raises ``SourceError`` and ``TokenizerError`` where a run would."""
    until, left = monotonic() + seconds, most_bytes
    seen, whole, reasons = set[tuple[int, int]](), set[tuple[int, int]](), list[str]()
    order.resources.io_stats.sparing = True
    opened = lru_cache(OPEN_SOURCES)(lambda source: order.documents(source, joined=False))
    # In the order of their numbers' bits in reverse files are evenly spread, wherever it is cut.
    shards = enumerate(order.record.shards)
    files = sorted(
        (f"{i:064b}"[::-1], source, i, shard)
        for source, own in shards
        for i, shard in enumerate(own)
    )
    for most in (PART_BYTES, sys.maxsize):
        for _, source, i, shard in files:
            size = min(most, shard.size)
            if (source, i) in whole or size > left or monotonic() > until:
                continue
            left -= size
            read = 0
            for rows in opened(source).read_part(i, 0, sys.maxsize):
                read += rows.ids.nbytes
                reasons += rows.reasons.values()
                if read >= most or monotonic() > until:
                    break
            else:
                whole.add((source, i))
            if (source, i) not in seen | whole:
                reasons += _at_end(order, source, i)
            seen.add((source, i))
    packed = [
        shard.path for _, *file, shard in files if tuple(file) not in whole and codec_of(shard.path)
    ]
    notes = [f"bad row: {reason}" for reason in reasons[:LISTED_ROWS]]
    if packed:
        notes.append(
            f"{len(packed):,} compressed files were not decoded whole: {', '.join(packed[:LISTED_ROWS])}"
        )
    if len(whole) == len(files):
        return "valid", notes
    part = f"{len(seen):,} of {len(files):,} files, {len(whole):,} of them whole"
    return f"valid as far as read: {part}; --scan reads all", notes


def _at_end(order: PipelineFactory, source: int, shard: int) -> list[str]:
    """Why rows at a file's end are bad, where it can be read without all before it. Raises as ``look`` does."""
    reader, config = order.readers.open(source), order.config.sources[source]
    entry = reader.shards[shard]
    if codec_of(entry.path):
        return []
    if isinstance(reader, LinesSource):
        reader.by_bytes, first = True, entry.size - END_BYTES
    elif scheme_of(config.spec).reader(reader.shards).stores_row_counts:
        first = reader.row_count(shard) - END_ROWS
    else:
        return []
    documents = order.all_rows(Documents, source, reader, joined=False)
    rows = documents.read_part(shard, max(1, first), sys.maxsize)
    bad = [reason for part in rows for reason in part.reasons.values()]
    # Lines were counted from a byte's number on.
    reasons = [re.sub(r"line \d+", "a line near the end", reason, count=1) for reason in bad]
    if reasons and not order.config.skips_bad_rows(config):
        raise SourceError(reasons[0])
    return reasons


#: Of plain text, how many files are looked at, and how many bytes of each.
FILES, HEAD_BYTES = 8, 1 << 18
#: Lines that have more bytes in the mean are documents. Shorter ones were wrapped, or belong together.
LONG_LINE_BYTES = 200
#: A larger file is no document: a row lies in memory as a whole.
DOCUMENT_BYTES = 64 << 20


def rows_of_text(factory: PipelineFactory) -> Iterator[tuple[str, str]]:
    """The alias of each source of plain text, which is read by lines, and the column that makes documents its rows."""
    for source in factory.config.sources:
        if isinstance(source.spec.scheme, TxtScheme) and source.spec.column == TEXT_COLUMN:
            yield source.name, _row_of(factory.readers.open(source.id))


def _row_of(reader: Source) -> str:
    sizes = {shard: entry.size for shard, entry in enumerate(reader.shards) if entry.size}
    lines = blank = size = 0
    for shard in islice(sizes, FILES):
        read = 0
        for rows in reader.read(shard, 0):
            of_lines = byte_sizes(rows.column)
            lines, blank = lines + len(of_lines), blank + int((of_lines == 0).sum())
            read += int(of_lines.sum())
            if read >= HEAD_BYTES:
                break
        size += read
    has_paragraphs = blank * 100 >= lines
    if not has_paragraphs and size >= LONG_LINE_BYTES * lines:
        return TEXT_COLUMN
    if len(sizes) > 1 and max(sizes.values()) <= DOCUMENT_BYTES:
        return FILE
    return PARAGRAPH if has_paragraphs else TEXT_COLUMN

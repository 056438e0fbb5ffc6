"""What the files of a new run hold: how many documents and tokens, and what of plain text is a document."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.columns import byte_sizes
from tokenloom_server.sources.schemes import FILE, PARAGRAPH, TEXT_COLUMN, TxtScheme

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

"""Rows of plain text: lines, paragraphs between blank lines, or whole files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import columns, row_index
from tokenloom_server.sources.base import Content, Rows
from tokenloom_server.sources.compressed import text_stream
from tokenloom_server.sources.files import codec_of
from tokenloom_server.sources.lines import BLOCK_BYTES, BOM, Block, not_utf8
from tokenloom_server.sources.row_index import IndexedSource, RowEnds, RowIndex
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.storage.arrow_input import FileStream
from tokenloom_server.storage.file import File, Range


def decode(block: Block, where: str) -> Iterator[Rows]:
    """The lines of a block as strings."""
    strings, bad = _strings(block), not_utf8(block, where)
    if bad:
        strings = columns.without_nulls(columns.blanked(strings, bad))
    yield from columns.pieces(Rows(block.first_row, strings, bad))


def _strings(block: Block) -> pa.Array:
    data, ends = block.data, block.ends
    # A \r belongs to a line's end only where \n follows, so not at the end of an unfinished line.
    returns = (np.frombuffer(data, np.uint8)[ends - 1] == 0x0D) & (ends > 0)
    returns[-1] &= data.endswith(b"\n")
    removed = np.arange(len(ends)) + np.cumsum(returns)
    count = int(np.count_nonzero(returns))
    if count and count == data.count(b"\r"):
        data = data.replace(b"\r", b"")  # eight times as fast as the search for a pair
    elif count:
        data = data.replace(b"\r\n", b"\n")
    text = data.replace(b"\n", b"")
    wide = len(text) > np.iinfo(np.int32).max
    offsets = np.zeros(len(ends) + 1, np.int64 if wide else np.int32)
    offsets[1:] = ends - removed
    kind = pa.LargeStringArray if wide else pa.StringArray
    return kind.from_buffers(len(ends), pa.py_buffer(offsets), pa.py_buffer(text))


class UnitsSource(IndexedSource):
    """A source of files of such rows."""

    def __init__(
        self, request: ReadRequest, ends_of: Callable[[bytes], npt.NDArray[np.int64]], trimmed: str
    ) -> None:
        """``ends_of``: the positions of the last byte of each row in text that begins with one; ``trimmed``: characters
        that belong to no row where they stand at its begin or end."""
        super().__init__(request)
        self._content = Content.TEXT
        self._ends_of, self._trimmed = ends_of, trimmed

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        entry = self._shards[shard]
        first, position = self._seek(shard, row) if row and codec_of(entry.path) is None else (0, 0)
        with self._open(entry) as file:
            file.plan([Range(position, file.size)])
            for block in self._blocks(file, entry.path, first, position):
                first = block.first_row + len(block.ends)
                if first > row:
                    block = block.cut(max(row - block.first_row, 0), len(block.ends))
                    edges = pa.py_buffer(
                        np.concatenate(([0], block.ends[:-1] + 1, [len(block.data)]))
                    )
                    text = pa.LargeStringArray.from_buffers(
                        len(block.ends), edges, pa.py_buffer(block.data)
                    )
                    for rows in columns.rows(text, block.first_row, self._where(entry)):
                        yield rows._replace(
                            column=pc.ascii_trim(rows.column, characters=self._trimmed)
                        )
        if not position:
            self._check_row(shard, row, first)

    def _blocks(self, file: File, path: str, row: int, position: int) -> Iterator[Block]:
        """Blocks of whole rows from a known row on, or of a compressed file from its begin."""
        stream = text_stream(file, path)
        if position and isinstance(stream, FileStream):
            stream.seek(position)
        held = b"" if position else bytes(stream.read(len(BOM))).removeprefix(BOM)
        while data := bytes(
            stream.read(max(BLOCK_BYTES, len(held)))
        ):  # doubling: long rows are joined a few times
            held += data
            if len(ends := self._ends_of(held)):
                stop = int(ends[-1]) + 1
                yield Block(row, held[:stop], ends)
                row, held = row + len(ends), held[stop:]
            elif len(held) > self._rules.most_bytes:
                raise SourceError(f"{file.name}: row {row} has {self._rules.too_long}")
        if held:
            yield Block(row, held, np.array([len(held)]))

    def _load_index(self, shard: int) -> RowIndex:
        entry = self._shards[shard]
        with self._open(entry) as file:

            def build() -> RowIndex:
                file.plan([Range(0, file.size)])
                return row_index.build(0, file.size, self._row_ends(file, entry.path))

            return row_index.cached(
                self._cache_path(shard, file, self._spec.column), entry.size, build
            )

    def _row_ends(self, file: File, path: str) -> Iterator[RowEnds]:
        position = len(BOM) if bytes(file.read_at(0, len(BOM))) == BOM else 0
        for block in self._blocks(file, path, 0, 0):
            is_whole = int(block.ends[-1]) < len(block.data)
            first = None if codec_of(path) else position + int(block.ends[0]) + 1
            yield RowEnds(first, len(block.ends) - (not is_whole), is_whole)
            position += len(block.data)


def paragraph_ends(data: bytes) -> npt.NDArray[np.int64]:
    """Where paragraphs end: with the first blank line after one that is not."""
    text = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(text == 0x0A)
    starts = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
    is_blank: npt.NDArray[np.bool_] = ends - starts <= (text[starts] == 0x0D)
    is_blank[1:] &= ~is_blank[:-1]
    is_blank[:1] = False
    return np.asarray(ends[is_blank], np.int64)


def file_ends(data: bytes) -> npt.NDArray[np.int64]:
    """Where files end, of which ``data`` is no more than one."""
    return np.zeros(0, np.int64)

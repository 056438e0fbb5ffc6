"""The common base of readers of files: a spec, shards below a folder, and the content of their column."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import columns, files, locations
from tokenloom_server.sources.base import BadRow, Content, Rows, Shard
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.selection import Selection
from tokenloom_server.storage.file import File
from tokenloom_server.storage.remote import RemoteFile

if TYPE_CHECKING:
    import pyarrow as pa

#: How long a remote file that was just opened counts as that, seconds.
KEPT_S = 60.0


class _Kept(NamedTuple):
    shard: Shard
    file: RemoteFile
    since: float


class ShardedSource(ABC):
    """The part of ``Source`` that does not depend on the format.

    A subclass has ``row_count``, ``blocks`` and ``_read``. It opens a file by ``_open``, names it in errors by
    ``_where``, and calls ``_refuse_without_rows`` when it is opened.
    """

    _content: Content | None = None
    """What the column holds: the subclass's to set, unless it calls ``_selection``."""

    def __init__(self, request: ReadRequest) -> None:
        self._spec = request.spec
        self._rules = request.rules
        self._shards = request.shards
        self._request = request
        self._kept: _Kept | None = None
        #: Of the schema and the folders that were last met: the next file has the same, as a rule.
        self._known_selection: tuple[Any, Mapping[str, str | None], Selection] | None = None

    @property
    def content(self) -> Content:
        assert self._content is not None, "no file was looked at"
        return self._content

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._shards

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        """See ``Source``."""
        for rows in self._read(shard, row):
            faults = list(() if self._rules.skip_bad else rows.bad[:1])
            if rows.column.nbytes > self._rules.most_bytes:
                faults += self._too_long(rows, self._where(self._shards[shard]))
            if faults:
                first = min(faults)
                if first.position:
                    yield rows.cut(0, first.position)
                raise SourceError(first.reason)
            # Rows that were given are not held: they may be a whole row group, and sources many.
            piece = [rows]
            del rows
            yield piece.pop()

    def _too_long(self, rows: Rows, where: str) -> Iterator[BadRow]:
        sizes = columns.byte_sizes(rows.column)
        for position in np.flatnonzero(sizes > self._rules.most_bytes).tolist():
            row, size = rows.first_row + position, sizes[position]
            yield BadRow(position, f"{where}: row {row} has {size:,} bytes, {self._rules.too_long}")

    @abstractmethod
    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        """As ``read``, with all bad rows marked and none raised."""

    def _check_row(self, shard: int, row: int, count: int) -> None:
        """Raises ``SourceError`` where a shard of ``count`` rows has no ``row`` to begin with."""
        if row > count:
            raise SourceError(
                f"{self._where(self._shards[shard])} has {count} rows, but row {row} was asked for"
            )

    def check(self, shard: int) -> object:
        """Raises ``SourceError`` where a file says itself what its columns hold, and these cannot be read."""
        return self._shards[shard]

    def _selection(self, shard: int, schema: pa.Schema) -> Selection:
        """What is read of a shard. Raises ``SourceError`` where the column is missing in it, or holds something else
        than in the first one that was looked at, and where a filter or template has no use for another column."""
        partitions = locations.partitions(self._shards[shard].path) if self._rules.filter else {}
        known = self._known_selection
        if known is not None and known[0].equals(schema) and known[1] == partitions:
            return known[2]
        where = self._where(self._shards[shard])
        content = columns.check_schema(schema, self._spec.column, where, self._rules)
        self._content = self._content or content
        if content is not None and content is not self._content:
            raise SourceError(
                f"{where}: column {self._spec.column!r} holds {content.value}, but the source's first shard holds "
                f"{self.content.value}; name them as two sources"
            )
        name, read = self._spec.column, self._rules.reads(self._spec.column)
        others = {*schema.names, name, *self._rules.text_columns}
        of_folders = {key: value for key, value in partitions.items() if key not in others}
        by_name = {
            key: columns.column_of(schema, key, where) for key in read if key not in of_folders
        }
        selection = Selection(self._rules, name, by_name, where, self._content, of_folders)
        self._known_selection = (
            (schema, partitions, selection) if self._content is not None else None
        )
        return selection

    def _where(self, shard: Shard) -> str:
        return files.where(self._spec, shard)

    def _open(self, shard: Shard, *, again: bool = False) -> File:
        """``again``: the file is opened once more soon, so the head and end that were read of a remote one are kept.

        Raises ``SourceChanged`` where it is missing or another file.
        """
        kept, self._kept = self._kept, None
        if kept is not None and kept.shard is shard and monotonic() - kept.since < KEPT_S:
            self._kept = kept if again else None
            return kept.file.again()
        file = self._request.open(shard)
        if again and isinstance(file, RemoteFile):
            self._kept = _Kept(shard, file, monotonic())
        return file

    def _refuse_empty_files(self, kind: str) -> None:
        for shard in self._shards:
            if shard.size == 0:
                raise SourceError(f"{self._where(shard)} is empty (0 bytes), expected {kind}")

    def _refuse_without_rows(self, has_rows: Callable[[int], object]) -> None:
        """Looks at files up to one that has rows, and one whose column is not null in each of them."""
        has_any = False
        for i in range(len(self._shards)):
            has_any = bool(has_rows(i)) or has_any
            if has_any and self._content is not None:
                return
        if has_any:
            raise SourceError(
                f"source {str(self._spec)!r}: {self._spec.column!r} is null in every row of its files, so there is "
                f"nothing to read; expected {columns.EXPECTED}: name another column"
            )
        raise no_rows(self._spec, self._shards, "have none")


def no_rows(spec: Spec, shards: Sequence[Shard], fault: str) -> SourceError:
    """The error of a source none of whose files has a row."""
    return SourceError(
        f"source {str(spec)!r} has no rows: its {len(shards)} files {fault} (the first is {shards[0].path!r}); give it "
        "files with content, or take it out of the mixture"
    )

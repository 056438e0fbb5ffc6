"""``jsonl:GLOB:COLUMN``: one JSON object per line, whose COLUMN is a string or a list of integers.

Blocks go through Arrow's JSON reader. It skips blank lines, takes several objects on a line and one
over several lines, and does not say which line is at fault; so its result counts only where each line
provably is one object, and every doubtful line is read again, alone, by Python's ``json``, which
decides what it means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays, columns, files
from tokenloom_server.sources.base import Content, Rows, Shard
from tokenloom_server.sources.lines import (
    Block,
    LinesSource,
    bad_utf8_line,
    read_blocks,
    require_rows,
    utf8_error,
)
from tokenloom_server.spec import Spec
from tokenloom_server.storage.traffic import Traffic

#: How far a source is searched for its first value that is not null, to learn whether it is text or ids.
PROBE_BYTES = 64 << 20

#: How many keys an error lists.
LISTED_KEYS = 20


def open_jsonl(
    spec: Spec, shards: tuple[Shard, ...], base_dir: Path, index_dir: Path | None, traffic: Traffic | None = None
) -> LinesSource:
    """Opens a source of JSON lines; reads up to the first value that is not null.

    Raises ``SourceError`` when all files are empty, or a line before that value is malformed.
    """
    require_rows(spec, shards, base_dir, traffic)
    content = _probe(spec, shards, base_dir, traffic)
    return LinesSource(spec, shards, base_dir, index_dir, content, Decoder(spec.column, content), traffic)


def _probe(spec: Spec, shards: tuple[Shard, ...], base_dir: Path, traffic: Traffic | None) -> Content:
    seen = 0
    for shard in shards:
        where = files.where(spec, shard)
        with files.open_shard(spec, shard, base_dir, traffic) as file:
            for block in read_blocks(file, None):
                for i in range(len(block.ends)):
                    value = value_of(block, i, spec.column, where)
                    if value is not None:
                        return Content.TEXT if isinstance(value, str) else Content.IDS
                seen += len(block.data)
                if seen >= PROBE_BYTES:
                    raise _all_null(spec, f"the first {seen} bytes")
    raise _all_null(spec, "every row")


def _all_null(spec: Spec, place: str) -> SourceError:
    return SourceError(
        f"source {str(spec)!r}: {spec.column!r} is null in {place}, so there is nothing to read; "
        "expected strings or lists of integers"
    )


def value_of(block: Block, i: int, column: str, where: str) -> str | list[int] | None:
    """The column's value in the i-th line of a block, by Python's ``json``.

    Raises ``SourceError`` naming file and line when it has none that a row can be made of.
    """
    at = f"{where}: line {block.first_row + i + 1}"
    try:
        text = block.line(i).decode()
    except UnicodeDecodeError:
        raise utf8_error(block, i, where) from None
    if not text.strip():
        raise SourceError(f"{at} is blank, expected a JSON object; remove the line")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{at} is malformed JSON ({error}); expected one object per line") from None
    if not isinstance(document, dict):
        raise SourceError(f"{at} is {_kind(document)}, expected a JSON object")
    if column not in document:
        keys = ", ".join(list(document)[:LISTED_KEYS]) or "none"
        raise SourceError(f"{at} has no key {column!r}; its keys are {keys}")
    value = document[column]
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{at}: {column!r} has half of a surrogate pair, which is no character") from None
        return value
    if isinstance(value, list):
        for item in value:
            if type(item) is not int or not -(2**63) <= item < 2**63:
                raise SourceError(f"{at}: {column!r} has {_shown(item)} among its ids, expected 64-bit integers")
        return value
    if value is None:
        return None
    raise SourceError(f"{at}: {column!r} is {_kind(value)}, expected a string or a list of integers")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _shown(item: Any) -> str:
    # A float's repr is its value; longer things are told by kind.
    return f"the number {item!r}" if type(item) in (int, float) else _kind(item)


class Decoder:
    """Turns blocks of JSON lines into rows of one column."""

    def __init__(self, column: str, content: Content) -> None:
        self._column = column
        self._content = content
        self._type = pa.string() if content is Content.TEXT else pa.list_(pa.int64())
        self._options = pa.json.ParseOptions(
            explicit_schema=pa.schema([(column, self._type)]),
            unexpected_field_behavior="ignore",
            newlines_in_values=False,
        )

    def __call__(self, block: Block, where: str) -> Iterator[Rows]:
        bad = bad_utf8_line(block)
        good = block if bad is None else block.cut(0, bad) if bad else None
        if good is not None:
            yield from self._rows(good, where)
        if bad is not None:
            raise utf8_error(block, bad, where)

    def _rows(self, block: Block, where: str) -> Iterator[Rows]:
        array = self._fast(block)
        count = len(block.ends)
        if array is None and count > 1:
            # Halving finds the doubtful lines in a few passes, and each is judged on its own, so that
            # a row does not depend on the block that it was read in.
            yield from self._rows(block.cut(0, count // 2), where)
            yield from self._rows(block.cut(count // 2, count), where)
            return
        if array is None:
            array = pa.array([self._checked(block, 0, where)], self._type)
        elif array.null_count:
            for i in arrays.numbers(pc.indices_nonzero(array.is_null())):
                try:
                    self._checked(block, int(i), where)  # null, or is there no such key?
                except SourceError:
                    yield from columns.rows(array.slice(0, int(i)), block.first_row, where, valid=True)
                    raise
        yield from columns.rows(array, block.first_row, where, valid=True)

    def _checked(self, block: Block, i: int, where: str) -> str | list[int] | None:
        value = value_of(block, i, self._column, where)
        if value is not None and isinstance(value, str) is not (self._content is Content.TEXT):
            raise SourceError(
                f"{where}: line {block.first_row + i + 1}: {self._column!r} is {_kind(value)}, "
                f"but the source's first row holds {self._content.value}; name them as two sources"
            )
        return value

    def _fast(self, block: Block) -> Any | None:
        """The column by Arrow's reader, or ``None`` where it fails or may have taken lines for other lines."""
        if not _each_line_is_braced(block):
            return None
        options = pa.json.ReadOptions(use_threads=False, block_size=min(len(block.data) + 1, 2**31 - 1))
        try:
            table = pa.json.read_json(pa.BufferReader(block.data), options, self._options)
        except pa.ArrowException:
            return None
        chunks = table.column(self._column).chunks
        if len(chunks) != 1 or len(chunks[0]) != len(block.ends):
            return None
        if self._content is Content.IDS and chunks[0].values.null_count:
            return None
        return chunks[0]


def _each_line_is_braced(block: Block) -> bool:
    """Whether every line begins with ``{`` and ends with ``}``.

    Inside of an object, ``}`` is never followed by ``{``, so then every line's end lies between two
    objects; and where there are as many objects as lines, each line is one.
    """
    raw = np.frombuffer(block.data, np.uint8)
    ends = block.ends
    starts = np.concatenate(([0], ends[:-1] + 1))
    if bool((starts >= ends).any()):
        return False
    last = raw[ends - 1]
    returns = last == 0x0D
    if bool(returns.any()):
        last = np.where(returns, raw[ends - 2], last)
    return bool((raw[starts] == 0x7B).all() and (last == 0x7D).all())

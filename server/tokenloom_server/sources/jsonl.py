"""Rows of JSON lines: one object per line, whose COLUMN is a string or a list of integers.

A blank line is a row that is left out, so that every line keeps its number. Blocks go through Arrow's JSON reader. It
skips blank lines, takes several objects on a line and one
over several lines, and does not say which line is at fault; so its result counts only where each line
provably is one object, and every doubtful line is read again, alone, by Python's ``json``, which
decides what it means.

A COLUMN with dots, such as ``meta.text``, is a key within an object, unless the first line that has it has a key of
just that name.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays, columns, files
from tokenloom_server.sources.base import BadRow, Content, Rows
from tokenloom_server.sources.columns import ColumnPath
from tokenloom_server.sources.compressed import text_stream
from tokenloom_server.sources.lines import Block, LinesSource, head_of, not_utf8, require_rows
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.selection import Selection, json_text
from tokenloom_server.storage.file import File

# What the first lines of JSON files say: their keys, where the columns that are read lie, and what these hold.


#: For the keys of a file, lines are looked at until each had a value, and so many at most; a longer line is not.
PROBE_LINES = 64
PROBE_LINE_BYTES = 16 * 2**20
#: Bytes of them that are read at once.
READ_BYTES = 2**16

#: How far a source is searched for its first value that is not null, to learn whether it is text or ids.
PROBE_BYTES = 64 << 20

#: How many keys an error lists.
LISTED_KEYS = 20


def columns_of(file: File, path: str) -> dict[str, Content | None]:
    """The keys of the first objects, in the order in which they occur."""
    contents: dict[str, Content | None] = {}
    undecided: set[str] = set()
    for line in itertools.islice(filter(bytes.strip, _lines(file, path)), PROBE_LINES):
        document = json.loads(line)
        if not isinstance(document, dict):
            raise ValueError("expected a JSON object on each line")
        for key, value in document.items():
            if value is None and key not in contents:
                undecided.add(key)
            if key not in contents or key in undecided:
                contents[key] = _content_of(value)
            if value is not None:
                undecided.discard(key)
        if not undecided:
            break
    return contents


def _lines(file: File, path: str) -> Iterator[bytes]:
    """A file's lines, up to one that is longer than ``PROBE_LINE_BYTES``: of that one, a part."""
    rest, stream = b"", text_stream(file, path)
    while data := bytes(stream.read(max(READ_BYTES, len(rest)))):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if len(rest) >= PROBE_LINE_BYTES:
            break
    if rest:
        yield rest


def _content_of(value: Any) -> Content | None:
    if isinstance(value, str):
        return Content.TEXT
    if isinstance(value, list) and all(type(item) is int for item in value):
        return Content.IDS
    return None


def probe(request: ReadRequest) -> dict[str, ColumnPath]:
    """Where the columns that are read lie in an object, and what they hold, by the first lines that have them.

    Raises ``SourceError`` for a source of nulls alone, and for a key that no line has.
    """
    search, size = _Search(request), 0
    for shard in request.shards:
        where = files.where(request.spec, shard)
        for block in head_of(request, shard):
            for i in range(len(block.ends)):
                if request.rules.skip_blank and not block.line(i).strip():
                    continue
                try:
                    search.look_at(document_of(block, i, where), line_name(block, i, where))
                except SourceError as error:
                    if not request.rules.skip_bad:
                        raise
                    search.fault = search.fault or str(error)
                if search.is_done:
                    return search.columns("")
            size += len(block.data)
            if size >= PROBE_BYTES:
                return search.columns(f"the first {size} bytes")
    return search.columns("every row")


class _Search:
    """Which of the columns that are read were met: where each lies, and what it holds."""

    def __init__(self, request: ReadRequest) -> None:
        self._spec = request.spec
        self._wanted = request.rules.reads(self._spec.column)
        self._paths: dict[str, tuple[str, ...]] = {}
        # A column that is only compared has the type of the constant, whatever its first value.
        compared = {"text": pa.string(), "number": pa.float64(), "truth": pa.bool_()}
        #: Why the first row that is bad is that, if one is.
        self.fault = ""
        texts = (self._spec.column, *request.rules.text_columns)
        self._kinds = {
            each.column: compared[each.kind]
            for each in request.rules.filter
            if each.column not in texts
        }
        if request.rules.as_json:
            self._kinds |= dict.fromkeys(texts, pa.string())

    @property
    def is_done(self) -> bool:
        return len(self._paths) == len(self._kinds) == len(self._wanted)

    def look_at(self, document: dict[str, Any], line: str) -> None:
        """Notes where the wanted columns lie, and what they hold, as far as an object has them."""
        for name in self._wanted:
            path = columns.find(
                lambda value: value if isinstance(value, dict) else None, document, name
            )
            if path is not None:
                self._paths.setdefault(name, path)
            is_own = name == self._spec.column
            if name not in self._kinds and (is_own or path is not None):
                path = self._paths.get(name, tuple(name.split(".")))
                value = value_of(document, path, name, line, required=is_own)
                if value is not None:
                    self._kinds[name] = kind_of(value, name, line, is_own=is_own)

    def columns(self, place: str) -> dict[str, ColumnPath]:
        """What was found; ``place`` is what was searched, where a column had no value but null."""
        source = f"source {str(self._spec)!r}"
        if self._spec.column not in self._kinds:
            raise SourceError(
                f"{source}: {self._spec.column!r} cannot be read in {place}; the first that is bad: {self.fault}"
                if self.fault
                else f"{source}: {self._spec.column!r} is null in {place}, so there is nothing to read; "
                "expected strings or lists of integers"
            )
        for name in self._wanted:
            if name not in self._paths:
                raise SourceError(
                    f"{source}: no line has the key {name!r} (looked for in {place}); check its spelling in "
                    "filter and template"
                )
        return {
            name: ColumnPath(self._paths[name], self._kinds.get(name, pa.string()))
            for name in self._wanted
        }


def kind_of(value: Any, name: str, line: str, *, is_own: bool) -> Any:
    """The Arrow type of a column with this value: text; ids where it is the source's own; else also integers."""
    if isinstance(value, str):
        return pa.string()
    if is_own and isinstance(value, list):
        return pa.list_(pa.int64())
    if not is_own and type(value) is int:
        return pa.int64()
    expected = "a list of integers" if is_own else "an integer"
    raise SourceError(f"{line}: {name!r} is {kind_name(value)}, expected a string or {expected}")


def line_name(block: Block, i: int, where: str) -> str:
    """How messages name the i-th line of a block of the file ``where``."""
    return f"{where}: line {block.first_row + i + 1}"


def document_of(block: Block, i: int, where: str) -> dict[str, Any]:
    """The object in the i-th line of a block, by Python's ``json``. Raises ``SourceError`` naming file and line."""
    line = line_name(block, i, where)
    try:
        text = block.line(i).decode()
    except UnicodeDecodeError:
        raise SourceError(not_utf8(block.cut(i, i + 1), where)[0].reason) from None
    if not block.line(i).strip():
        raise SourceError(
            f"{line} is blank, expected a JSON object; remove the line, or set on_blank_line: skip"
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{line} is malformed JSON ({error}); expected one object per line"
        ) from None
    if not isinstance(document, dict):
        raise SourceError(f"{line} is {kind_name(document)}, expected a JSON object")
    return document


def value_of(
    document: dict[str, Any], path: tuple[str, ...], name: str, line: str, *, required: bool
) -> Any:
    """The value at a path of an object; None below a null, and where a key is missing that is not ``required``.

    Raises ``SourceError`` beginning with ``line``.
    """
    value: Any = document
    for depth, key in enumerate(path):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise SourceError(
                f"{line}: {'.'.join(path[:depth])!r} is {kind_name(value)}, expected an object"
            )
        if key not in value:
            if not required:
                return None
            keys = ", ".join(list(value)[:LISTED_KEYS]) or "none"
            raise SourceError(f"{line} has no key {name!r}; its keys are {keys}")
        value = value[key]
    return value


def kind_name(value: Any) -> str:
    """For messages: what JSON calls a value."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


#: What a value has to be, by the Arrow type of its column.
_EXPECTED = {
    "string": "a string",
    "bool": "true or false",
    "double": "a number",
    "int64": "an integer",
}


def open_jsonl(request: ReadRequest) -> LinesSource:
    """Opens a source of JSON lines; reads up to the first value of each column that is not null.

    Raises ``SourceError`` when all files are empty, or a line before that value is malformed.
    """
    require_rows(request)
    spec = request.spec
    decode = Decoder(Selection(request.rules, spec.column, probe(request), f"source {str(spec)!r}"))
    return LinesSource(request, decode.content, decode)


class Decoder:
    """Turns blocks of JSON lines into rows of one column."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._column = selection.column
        self._columns = selection.columns
        self._kind = self._columns[self._column].kind
        self.content = Content.TEXT if pa.types.is_string(self._kind) else Content.IDS
        self._options = pa.json.ParseOptions(
            explicit_schema=_schema(self._columns),
            unexpected_field_behavior="ignore",
            newlines_in_values=False,
        )

    def __call__(self, block: Block, where: str) -> Iterator[Rows]:
        bad = not_utf8(block, where)
        parts: list[Rows] = []
        start = 0
        for row in (*bad, None):
            stop = len(block.ends) if row is None else row.position
            if start < stop:
                parts += self._rows(block.cut(start, stop), where)
            if row is not None:
                parts.append(self._bad(block.first_row + row.position, row.reason))
                start = row.position + 1
        yield from parts if len(parts) == 1 else columns.pieces(columns.joined(parts))

    def _rows(self, block: Block, where: str) -> Iterator[Rows]:
        if self._selection.rules.as_json:
            # Arrow's reader would make one type of all values, and so others of them.
            yield from (self._row(block.cut(i, i + 1), where) for i in range(len(block.ends)))
            return
        # Objects in the place of empty lines, so that Arrow takes as many rows as there are lines.
        blank = (
            block.empty()
            if self._selection.rules.skip_blank
            else np.zeros(len(block.ends), np.bool_)
        )
        batch = self._fast(block.with_text(blank, b"{}") if blank.any() else block)
        count = len(block.ends)
        if batch is None and count > 1:
            # Halving finds the doubtful lines in a few passes, and each is judged on its own, so that
            # a row does not depend on the block that it was read in.
            yield from self._rows(block.cut(0, count // 2), where)
            yield from self._rows(block.cut(count // 2, count), where)
        elif batch is None:
            yield self._row(block, where)
        else:
            bad = []
            own = self._columns[self._column].of(batch)
            nulls = (
                arrays.numbers(pc.indices_nonzero(own.is_null()))
                if own.null_count
                else np.zeros(0, np.int64)
            )
            for i in nulls[~blank[nulls]].tolist():
                try:
                    self._own(document_of(block, i, where), line_name(block, i, where))
                except SourceError as error:  # no null, but no such key
                    bad.append(BadRow(i, str(error)))
            for rows in self._selection.rows(batch, block.first_row, where, valid=True, bad=bad):
                first = rows.first_row - block.first_row
                left_out = blank[first : first + len(rows.column)]
                if left_out.any():
                    left_out = left_out if rows.filtered is None else left_out | rows.filtered
                    rows = rows._replace(filtered=left_out)
                yield rows

    def _row(self, block: Block, where: str) -> Rows:
        """A block of one line."""
        line, rules = line_name(block, 0, where), self._selection.rules
        if rules.skip_blank and not block.line(0).strip():
            return Rows(block.first_row, self._empty(), (), np.ones(1, np.bool_))
        try:
            document = document_of(block, 0, where)
            values = {name: self._other(document, name, line) for name in rules.filter_columns}
            passing = self._selection.passing(values)
            if passing is not None and not passing[0]:
                return Rows(block.first_row, self._empty(), (), ~passing)
            values |= {name: self._other(document, name, line) for name in rules.text_columns}
            values[self._column] = pa.array([self._own(document, line)], self._kind)
            return Rows(block.first_row, columns.without_nulls(self._selection.text(values)))
        except SourceError as error:
            return self._bad(block.first_row, str(error))

    def _bad(self, row: int, reason: str) -> Rows:
        return Rows(row, self._empty(), (BadRow(0, reason),))

    def _empty(self) -> pa.Array:
        return pa.array(["" if self.content is Content.TEXT else []], self._kind)

    def _own(self, document: dict[str, Any], line: str) -> str | list[int] | None:
        """The value of the source's own column. Raises ``SourceError`` when no row can be made of it."""
        name = self._column
        value: str | list[int] | None = value_of(
            document, self._columns[name].names, name, line, required=True
        )
        if value is None:
            return None
        if self._selection.rules.as_json:
            value = json_text(value, quoted=self._selection.rules.quoted)
        if self._selection.rules.is_mask and isinstance(value, list):
            value = [int(item) if isinstance(item, bool) else item for item in value]
        kind = kind_of(value, name, line, is_own=True)
        if isinstance(value, str):
            _check_text(value, name, line)
        else:
            for item in value:
                if type(item) is not int or not -(2**63) <= item < 2**63:
                    raise SourceError(
                        f"{line}: {name!r} has {_shown(item)} among its ids, expected 64-bit integers"
                    )
        if kind != self._kind:
            raise SourceError(
                f"{line}: {name!r} is {kind_name(value)}, "
                f"but the source's first row holds {self.content.value}; name them as two sources"
            )
        return value

    def _other(self, document: dict[str, Any], name: str, line: str) -> pa.Array:
        """The value of a column of the rules, as an array of one."""
        kind, path = self._columns[name].kind, self._columns[name].names
        is_own = name == self._column
        value: Any = (
            self._own(document, line)
            if is_own
            else value_of(document, path, name, line, required=False)
        )
        if value is None:
            return pa.array([None], kind)
        if self._selection.rules.as_json and name in self._selection.rules.text_columns:
            value = json_text(value, quoted=self._selection.rules.quoted)
        if pa.types.is_string(kind) and isinstance(value, str):
            _check_text(value, name, line)
        elif pa.types.is_floating(kind) and type(value) in (int, float):
            value = (
                float(value) if abs(value) < 2.0**1023 else math.inf
            )  # as Arrow, which refuses what is no double
        matches = {
            "string": isinstance(value, str),
            "bool": isinstance(value, bool),
            "double": isinstance(value, float) and math.isfinite(value),
            "int64": type(value) is int and -(2**63) <= value < 2**63,
        }
        if not matches.get(str(kind), True):
            raise SourceError(
                f"{line}: {name!r} is {_shown(value)}, expected {_EXPECTED[str(kind)]}"
            )
        return pa.array([value], kind)

    def _fast(self, block: Block) -> pa.RecordBatch | None:
        """The batches of Arrow's reader, or ``None`` where it fails or may have split lines otherwise."""
        if not _each_line_is_braced(block):
            return None
        options = pa.json.ReadOptions(
            use_threads=False, block_size=min(len(block.data) + 1, 2**31 - 1)
        )
        try:
            batches = pa.json.read_json(
                pa.BufferReader(block.data), options, self._options
            ).to_batches()
            if len(batches) != 1 or len(batches[0]) != len(block.ends):
                return None
            own = self._columns[self._column].of(batches[0])
        except pa.ArrowException:
            return None
        if self.content is Content.IDS and own.values.null_count:
            return None
        return batches[0]


def _check_text(value: str, name: str, line: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SourceError(
            f"{line}: {name!r} has half of a surrogate pair, which is no character"
        ) from None


def _shown(item: Any) -> str:
    # A float's repr is its value; of longer values the kind is said.
    return f"the number {item!r}" if type(item) in (int, float) else kind_name(item)


def _schema(by_name: Mapping[str, ColumnPath]) -> pa.Schema:
    """The fields that Arrow is to read, those of one object together."""
    tree: dict[str, Any] = {}
    for column in by_name.values():
        *above, last = column.names
        within = tree
        for name in above:
            within = within.setdefault(name, {})
        within[last] = column.kind

    def fields_of(fields: dict[str, Any]) -> list[tuple[str, Any]]:
        return [
            (name, pa.struct(fields_of(kind)) if isinstance(kind, dict) else kind)
            for name, kind in fields.items()
        ]

    return pa.schema(fields_of(tree))


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

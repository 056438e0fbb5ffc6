"""Rows of JSON lines: one object per line, whose COLUMN is a string or a list of integers.

Blocks go through Arrow's JSON reader. It skips blank lines, takes several objects on a line and one
over several lines, and does not say which line is at fault; so its result counts only where each line
provably is one object, and every doubtful line is read again, alone, by Python's ``json``, which
decides what it means.

A COLUMN with dots, such as ``meta.text``, is a key within an object, unless the first line that has it has a key of
just that name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays, columns, files
from tokenloom_server.sources.base import BadRow, Content, Rows
from tokenloom_server.sources.columns import Column
from tokenloom_server.sources.lines import Block, LinesSource, blocks_of, not_utf8, require_rows
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.selection import Selection

#: How far a source is searched for its first value that is not null, to learn whether it is text or ids.
PROBE_BYTES = 64 << 20

#: How many keys an error lists.
LISTED_KEYS = 20

#: What a value has to be, by the Arrow type of its column.
_EXPECTED = {"string": "a string", "bool": "true or false", "double": "a number", "int64": "an integer"}


def open_jsonl(request: ReadRequest) -> LinesSource:
    """Opens a source of JSON lines; reads up to the first value of each column that is not null.

    Raises ``SourceError`` when all files are empty, or a line before that value is malformed.
    """
    require_rows(request)
    spec, rules = request.spec, request.rules
    probed = _probe(request)
    selection = Selection(rules, spec.column, probed, f"source {str(spec)!r}")
    decode = Decoder(spec.column, rules, probed, selection)
    return LinesSource(request, _content_of(probed[spec.column]), decode)


def _probe(request: ReadRequest) -> dict[str, Column]:
    """Where the columns that are read lie in an object, and what they hold, by the first lines that have them."""
    spec, rules = request.spec, request.rules
    wanted, seen = rules.reads(spec.column), 0
    paths: dict[str, tuple[str, ...]] = {}
    # A column that is only compared has the type of the constant, whatever its first value.
    compared = {"text": pa.string(), "number": pa.float64(), "truth": pa.bool_()}
    kinds = {each.column: compared[each.kind] for each in rules.filter}
    for name in (spec.column, *rules.text_columns):
        kinds.pop(name, None)
    for block, where in _all_blocks(request):
        for i in range(len(block.ends)):
            line_name = f"{where}: line {block.first_row + i + 1}"
            try:
                _look_at(document_of(block, i, where), spec, wanted, paths, kinds, line_name)
            except SourceError:
                if not rules.skip_bad:
                    raise
            if len(paths) == len(kinds) == len(wanted):
                return {name: Column(paths[name], kinds[name]) for name in wanted}
        seen += len(block.data)
        if seen >= PROBE_BYTES:
            return _found(spec, wanted, paths, kinds, f"the first {seen} bytes")
    return _found(spec, wanted, paths, kinds, "every row")


def _all_blocks(request: ReadRequest) -> Iterator[tuple[Block, str]]:
    for shard in request.shards:
        with request.open(shard) as file:
            for block in blocks_of(file, shard):
                yield block, files.where(request.spec, shard)


def _look_at(
    document: dict[str, Any],
    spec: Spec,
    wanted: tuple[str, ...],
    paths: dict[str, tuple[str, ...]],
    kinds: dict[str, Any],
    at: str,
) -> None:
    """Notes where the wanted columns lie, and what they hold, as far as an object has them."""
    for name in wanted:
        path = columns.find(_keys_of, document, name)
        if path is not None:
            paths.setdefault(name, path)
        own = name == spec.column
        if name not in kinds and (own or path is not None):
            value = value_of(document, paths.get(name, tuple(name.split("."))), name, at, required=own)
            if value is not None:
                kinds[name] = _kind_of(value, name, at, ids=own)


def _found(
    spec: Spec,
    wanted: tuple[str, ...],
    paths: Mapping[str, tuple[str, ...]],
    kinds: Mapping[str, Any],
    place: str,
) -> dict[str, Column]:
    """What was found, where a column has no value but null."""
    if spec.column not in kinds:
        raise SourceError(
            f"source {str(spec)!r}: {spec.column!r} is null in {place}, so there is nothing to read; "
            "expected strings or lists of integers"
        )
    for name in wanted:
        if name not in paths:
            raise SourceError(
                f"source {str(spec)!r}: no line has the key {name!r} (looked for in {place}); check its spelling in "
                "filter and template"
            )
    return {name: Column(paths[name], kinds.get(name, pa.string())) for name in wanted}


def _content_of(column: Column) -> Content:
    return Content.TEXT if pa.types.is_string(column.kind) else Content.IDS


def _keys_of(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _kind_of(value: Any, name: str, at: str, *, ids: bool) -> Any:
    """The Arrow type of a column with this value: text, ids where it is the source's own, else also integers."""
    if isinstance(value, str):
        return pa.string()
    if ids and isinstance(value, list):
        return pa.list_(pa.int64())
    if not ids and type(value) is int:
        return pa.int64()
    raise SourceError(
        f"{at}: {name!r} is {_kind(value)}, expected a string or {'a list of integers' if ids else 'an integer'}"
    )


def document_of(block: Block, i: int, where: str) -> dict[str, Any]:
    """The object in the i-th line of a block, by Python's ``json``. Raises ``SourceError`` naming file and line."""
    line_name = f"{where}: line {block.first_row + i + 1}"
    try:
        text = block.line(i).decode()
    except UnicodeDecodeError:
        raise SourceError(not_utf8(block.cut(i, i + 1), where)[0].reason) from None
    if not text.strip():
        raise SourceError(f"{line_name} is blank, expected a JSON object; remove the line")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{line_name} is malformed JSON ({error}); expected one object per line") from None
    if not isinstance(document, dict):
        raise SourceError(f"{line_name} is {_kind(document)}, expected a JSON object")
    return document


def value_of(document: dict[str, Any], path: tuple[str, ...], name: str, at: str, *, required: bool) -> Any:
    """The value at a path of an object; None below a null, and where a key is missing that is not ``required``.

    Raises ``SourceError`` beginning with ``at``.
    """
    value: Any = document
    for depth, key in enumerate(path):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise SourceError(f"{at}: {'.'.join(path[:depth])!r} is {_kind(value)}, expected an object")
        if key not in value:
            if not required:
                return None
            keys = ", ".join(list(value)[:LISTED_KEYS]) or "none"
            raise SourceError(f"{at} has no key {name!r}; its keys are {keys}")
        value = value[key]
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _shown(item: Any) -> str:
    # A float's repr is its value; of longer values the kind is said.
    return f"the number {item!r}" if type(item) in (int, float) else _kind(item)


class Decoder:
    """Turns blocks of JSON lines into rows of one column."""

    def __init__(self, column: str, rules: RowRules, by_name: Mapping[str, Column], selection: Selection) -> None:
        """``by_name``: each column that is read, by its name in the rules."""
        self._column = column
        self._rules = rules
        self._columns = by_name
        self._selection = selection
        self._content = _content_of(by_name[column])
        self._options = pa.json.ParseOptions(
            explicit_schema=_schema(by_name),
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
        batch = self._fast(block)
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
            for i in arrays.numbers(pc.indices_nonzero(own.is_null())).tolist() if own.null_count else ():
                try:
                    self._own(document_of(block, i, where), f"{where}: line {block.first_row + i + 1}")
                except SourceError as error:  # no null, but no such key
                    bad.append(BadRow(i, str(error)))
            yield from self._selection.rows(batch, block.first_row, where, valid=True, bad=bad)

    def _row(self, block: Block, where: str) -> Rows:
        """A block of one line."""
        line_name = f"{where}: line {block.first_row + 1}"
        try:
            document = document_of(block, 0, where)
            values = {name: self._other(document, name, line_name) for name in self._rules.filter_columns}
            passing = self._selection.passing(values)
            if passing is not None and not passing[0]:
                return Rows(block.first_row, self._empty(), (), ~passing)
            values |= {name: self._other(document, name, line_name) for name in self._rules.text_columns}
            values[self._column] = pa.array([self._own(document, line_name)], self._columns[self._column].kind)
            return Rows(block.first_row, columns.without_nulls(self._selection.text(values)))
        except SourceError as error:
            return self._bad(block.first_row, str(error))

    def _bad(self, row: int, reason: str) -> Rows:
        return Rows(row, self._empty(), (BadRow(0, reason),))

    def _empty(self) -> Any:
        empty: Any = "" if self._content is Content.TEXT else []
        return pa.array([empty], self._columns[self._column].kind)

    def _own(self, document: dict[str, Any], at: str) -> str | list[int] | None:
        """The value of the source's own column. Raises ``SourceError`` when no row can be made of it."""
        value: str | list[int] | None = value_of(
            document, self._columns[self._column].names, self._column, at, required=True
        )
        if isinstance(value, str):
            self._check_text(value, self._column, at)
        elif isinstance(value, list):
            for item in value:
                if type(item) is not int or not -(2**63) <= item < 2**63:
                    raise SourceError(
                        f"{at}: {self._column!r} has {_shown(item)} among its ids, expected 64-bit integers"
                    )
        elif value is not None:
            raise SourceError(f"{at}: {self._column!r} is {_kind(value)}, expected a string or a list of integers")
        if value is not None and isinstance(value, str) is not (self._content is Content.TEXT):
            raise SourceError(
                f"{at}: {self._column!r} is {_kind(value)}, "
                f"but the source's first row holds {self._content.value}; name them as two sources"
            )
        return value

    def _other(self, document: dict[str, Any], name: str, at: str) -> Any:
        """The value of another column, as an array of one."""
        kind = self._columns[name].kind
        value: Any = (
            self._own(document, at)
            if name == self._column
            else value_of(document, self._columns[name].names, name, at, required=False)
        )
        if value is None:
            return pa.array([None], kind)
        if pa.types.is_string(kind) and isinstance(value, str):
            self._check_text(value, name, at)
        elif pa.types.is_floating(kind) and type(value) in (int, float):
            value = float(value) if abs(value) < 2.0**1023 else math.inf  # as Arrow, which refuses what is no double
        matches = {
            "string": isinstance(value, str),
            "bool": isinstance(value, bool),
            "double": isinstance(value, float) and math.isfinite(value),
            "int64": type(value) is int and -(2**63) <= value < 2**63,
        }
        if not matches.get(str(kind), True):
            raise SourceError(f"{at}: {name!r} is {_shown(value)}, expected {_EXPECTED[str(kind)]}")
        return pa.array([value], kind)

    def _check_text(self, value: str, name: str, at: str) -> None:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{at}: {name!r} has half of a surrogate pair, which is no character") from None

    def _fast(self, block: Block) -> Any | None:
        """The batches of Arrow's reader, or ``None`` where it fails or may have split lines otherwise."""
        if not _each_line_is_braced(block):
            return None
        options = pa.json.ReadOptions(use_threads=False, block_size=min(len(block.data) + 1, 2**31 - 1))
        try:
            batches = pa.json.read_json(pa.BufferReader(block.data), options, self._options).to_batches()
            if len(batches) != 1 or len(batches[0]) != len(block.ends):
                return None
            own = self._columns[self._column].of(batches[0])
        except pa.ArrowException:
            return None
        if self._content is Content.IDS and own.values.null_count:
            return None
        return batches[0]


def _schema(found: Mapping[str, Column]) -> Any:
    """The fields that Arrow is to read, those of one object together."""
    tree: dict[str, Any] = {}
    for column in found.values():
        *above, last = column.names
        within = tree
        for name in above:
            within = within.setdefault(name, {})
        within[last] = column.kind

    def of(fields: dict[str, Any]) -> list[tuple[str, Any]]:
        return [(name, pa.struct(of(kind)) if isinstance(kind, dict) else kind) for name, kind in fields.items()]

    return pa.schema(of(tree))


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

"""What the first lines of JSON files say: their keys, where the columns that are read lie, and what these hold."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import columns, files
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.columns import ColumnPath
from tokenloom_server.sources.compressed import text_stream
from tokenloom_server.sources.lines import Block, head_of, not_utf8
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.storage.file import File

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

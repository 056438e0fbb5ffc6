"""Rows become documents: text is tokenised, ids pass through, and begin- and end-of-text ids go around them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow
from tokenloom_server.tokenizer.definition import id_dtype
from tokenloom_server.tokenizer.engine import Encoded, Ends, Engine, Ids


class Documents(NamedTuple):
    """Tokens of consecutive rows, begin- and end-of-text ids included.

    ``values``: the narrow unsigned dtype, [tokens]; may be a read-only view of the column's memory.
    ``ends``: int64, [rows]; row i's tokens are ``values[ends[i - 1] : ends[i]]``. A null or empty row has none, nor
    has one that is ``bad`` (ascending). ``mask``: uint8, [tokens], 0 where no loss counts a token; None where each
    does.
    """

    values: Ids
    ends: Ends
    bad: tuple[BadRow, ...] = ()
    mask: npt.NDArray[np.uint8] | None = None


class Encoder(Protocol):
    """How do a source's rows become ids? Asked with their place, since a row may be the end of the process."""

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Tokens of an Arrow column that begins at a shard's row. Raises ``TokenizerError``."""


class Guard(Protocol):
    """Who encodes texts of which a process may die?"""

    def encode(
        self, texts: pa.LargeStringArray, first_row: int, shard: int
    ) -> tuple[Encoded, Sequence[BadRow]]:
        """Their ids, and those that have none since every engine crashes at them. Raises ``TokenizerError``."""


class DocumentEncoder:
    """Encodes the columns of one source. Keeps nothing between calls; as thread-safe as its engine."""

    def __init__(
        self,
        engine: Engine | None,
        *,
        vocab_size: int,
        bos_id: int | None = None,
        eot_id: int | None = None,
        ends_once: bool = False,
        skip_bad: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """``engine`` may be None where the source holds ids; ``guard`` encodes in its place, if one is. ``bos_id``
        and ``eot_id``, of the vocabulary, are put before and after each document; None: nothing is. ``ends_once``: a
        document that ends with ``eot_id`` already gets no second one. ``skip_bad``: rows with ids outside the
        vocabulary are reported in ``Documents.bad`` instead of being an error.

        Raises ``TokenizerError`` when the vocabulary is wider than uint32.
        """
        self.dtype = id_dtype(vocab_size)
        self.vocab_size = vocab_size
        self._engine = engine
        self._guard = guard
        self._eot_id = eot_id
        self._ends_once = ends_once
        self._skip_bad = skip_bad
        self._bos = self._mark(bos_id)
        self._eot = self._mark(eot_id)

    def encode(self, column: pa.Array, first_row: int = 0, shard: int = 0) -> Documents:
        """Tokens of a (large_)string column, or of a (large_)list column of integers.

        ``first_row`` is the row of the ``shard`` that the column begins at. Raises ``TokenizerError``, naming the row,
        for a null among the ids, an id outside the vocabulary, text that is not UTF-8, a column of another type, or
        text without a tokeniser.
        """
        documents = self.unbounded(column, first_row, shard)
        return Documents(*self.bounded(documents.values, documents.ends), documents.bad)

    def unbounded(self, column: pa.Array, first_row: int, shard: int) -> Documents:
        """As ``encode``, but without begin- and end-of-text ids: ids of the narrow dtype are not copied."""
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            encoded, crashed = self._tokenised(column, first_row, shard)
        elif _is_id_list(column.type):
            encoded, crashed = _flattened(column, first_row), ()
        else:
            raise TokenizerError(
                f"a column of {column.type} has no tokens; expected text, or lists of integer ids"
            )
        bad = self._out_of_range(encoded, first_row)
        if bad and not self._skip_bad:
            raise TokenizerError(bad[0].reason, bad[0].position)
        if bad:
            encoded = _without(encoded, bad)
        # None is in both: what has no ids has none outside the vocabulary.
        return Documents(
            encoded.values.astype(self.dtype, copy=False),
            encoded.ends,
            tuple(sorted((*bad, *crashed))),
        )

    def _mark(self, value: int | None) -> pa.LargeBinaryScalar | None:
        if value is None:
            return None
        return arrays.scalar(value.to_bytes(self.dtype.itemsize, sys.byteorder))

    def _tokenised(
        self, column: pa.Array, first_row: int, shard: int
    ) -> tuple[Encoded, Sequence[BadRow]]:
        if self._engine is None:
            raise TokenizerError(
                "the column holds text, but the run has no tokeniser; set tokenizer in the mixture file, "
                "or name a column of ids"
            )
        texts = column.cast(pa.large_string())
        if texts.null_count:
            texts = arrays.filled(texts)
        try:
            # Parquet and Arrow files are not checked by their readers, and engines trust what they get.
            texts.validate(full=True)
        except pa.ArrowInvalid as error:
            raise TokenizerError(
                f"row {_first_not_utf8(texts, first_row)}: the text is not UTF-8 ({error})"
            ) from None
        return (
            (self._engine.encode(texts), ())
            if self._guard is None
            else self._guard.encode(texts, first_row, shard)
        )

    def _out_of_range(self, encoded: Encoded, first_row: int) -> tuple[BadRow, ...]:
        """The rows with an id outside the vocabulary."""
        values = encoded.values
        limit = min(self.vocab_size, int(np.iinfo(values.dtype).max) + 1)
        if not len(values) or (values.dtype.kind == "u" and limit < self.vocab_size):
            return ()
        # Seen as unsigned, a negative id lies above every positive one: a single pass finds both faults.
        unsigned = values.view(f"u{values.dtype.itemsize}")
        if int(unsigned.max()) < limit:
            return ()
        positions = np.flatnonzero(unsigned >= limit)
        rows, first = np.unique(
            np.searchsorted(encoded.ends, positions, side="right"), return_index=True
        )
        return tuple(
            BadRow(
                row,
                f"row {first_row + row}: the id {values[index]} is outside the vocabulary "
                f"(0 to {self.vocab_size - 1}); name the tokeniser that made these ids, or set vocab_size to theirs",
            )
            for row, index in zip(rows.tolist(), positions[first].tolist(), strict=True)
        )

    def bounded(self, values: Ids, ends: Ends) -> Encoded:
        """Rows of ``unbounded`` with begin- and end-of-text ids."""
        if (self._bos is None and self._eot is None) or not len(ends):
            return Encoded(values, ends)
        filled = np.empty(len(ends), np.bool_)
        filled[0] = ends[0] > 0
        np.greater(ends[1:], ends[:-1], out=filled[1:])
        if self._eot is not None:
            ended = filled
            if self._ends_once:
                ended = filled.copy()
                ended[filled] = values[ends[filled] - 1] != self._eot_id
            if not self._ends_once or ended.any():
                values = _with_id(values, ends[ended], self._eot)
                ends = ends + ended.cumsum()
        if self._bos is not None:
            begins = np.append(np.int64(0), ends[:-1])
            values = _with_id(values, begins[filled], self._bos)
            ends = ends + filled.cumsum()
        return Encoded(values, ends)


class ReadyEncoder:
    """Implements ``Encoder`` for rows that are documents already: lists of ids, or of these and their loss mask."""

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        masks = column.field(1) if pa.types.is_struct(column.type) else None
        encoded = _flattened(column if masks is None else column.field(0), first_row)
        return Documents(
            *encoded, mask=None if masks is None else _flattened(masks, first_row).values
        )


def _without(encoded: Encoded, rows: Iterable[BadRow]) -> Encoded:
    """The same rows, these without ids."""
    lengths = np.diff(encoded.ends, prepend=0)
    keep = np.ones(len(lengths), np.bool_)
    keep[[row.position for row in rows]] = False
    return Encoded(encoded.values[np.repeat(keep, lengths)], np.cumsum(lengths * keep))


def _with_id(values: Ids, at: Ends, mark: pa.LargeBinaryScalar) -> Ids:
    """``values`` with an id, given as its bytes, put before each of the positions ``at``; read only.

    The positions ascend, and none is there twice.
    """
    width = values.itemsize
    edges = np.empty(len(at) + 2, np.int64)
    edges[0], edges[-1] = 0, len(values) * width
    np.multiply(at, width, out=edges[1:-1])
    # Joining strings of bytes copies whole documents at once: measured at a third of a masked assignment,
    # on documents of 60 to 3,000 ids, and far below np.insert, np.repeat, a gather or a loop over slices.
    parts = pa.Array.from_buffers(
        pa.large_binary(),
        len(at) + 1,
        [None, pa.py_buffer(edges), pa.py_buffer(values)],
        null_count=0,
    )
    joined = pc.call_function(
        "binary_join", [arrays.lists(np.array([0, len(parts)], np.int32), parts), mark]
    )
    return np.frombuffer(joined.buffers()[2], values.dtype, len(values) + len(at))


def _is_id_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))


def _flattened(column: pa.Array, first_row: int) -> Encoded:
    """The ids of all rows, none of which is copied, and where each row ends in them."""
    if column.null_count:
        # Arrow allows anything to lie under a null; flatten() leaves it out.
        ends = np.cumsum(arrays.lengths(column))
        ids = column.flatten()
    else:
        offsets = _offsets(column)
        ends = np.subtract(offsets[1:], offsets[0], dtype=np.int64)
        ids = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    if ids.null_count:
        position = int(pc.indices_nonzero(ids.is_null())[0].as_py())
        row = first_row + int(np.searchsorted(ends, position, side="right"))
        raise TokenizerError(f"row {row}: there is a null among the ids; expected integers only")
    return Encoded(arrays.numbers(ids), ends)


def _offsets(column: pa.Array) -> npt.NDArray[np.signedinteger[Any]]:
    """Where each row of a (large_)list column begins in its items, and where the last ends: [rows + 1]."""
    kind = np.dtype(np.int64 if pa.types.is_large_list(column.type) else np.int32)
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(len(column) + 1, kind)
    return np.frombuffer(buffer, kind, len(column) + 1, column.offset * kind.itemsize)


def _first_not_utf8(texts: pa.LargeStringArray, first_row: int) -> int:
    for row, text in enumerate(texts.cast(pa.large_binary())):
        try:
            text.as_py().decode("utf-8")
        except UnicodeDecodeError:
            return first_row + row
    return first_row


class MaskedEncoder:
    """Encodes the ids with another encoder, and puts each one's mask beside it.

    A begin-of-text id that is added counts for no loss, and an end-of-text id does if the id before it does.
    """

    def __init__(self, encoder: Encoder, column: str, *, adds_bos: bool) -> None:
        """``column``: of the masks, for messages."""
        self._encoder = encoder
        self._column = column
        self._adds_bos = adds_bos

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Raises ``TokenizerError``, naming the row, where a mask is not one 0 or 1 for each id, and what the other
        encoder raises."""
        ids, mask = column.field(0), column.field(1)
        documents = self._encoder.encode(ids, first_row, shard)
        lengths = np.diff(documents.ends, prepend=0)
        filled = lengths > 0
        own, masked = arrays.lengths(ids), arrays.lengths(mask)
        other = np.flatnonzero(filled & (own != masked))
        if len(other):
            index = int(other[0])
            raise TokenizerError(
                f"row {first_row + index}: {self._column!r} has {masked[index]} values for {own[index]} ids; "
                "expected one each"
            )
        flat = mask.flatten()
        if flat.null_count:
            raise TokenizerError(
                f"rows from {first_row} on: {self._column!r} has a null among its values; expected 0 or 1"
            )
        # Of rows that give no tokens, nobody asks for the mask.
        values = arrays.numbers(flat)[np.repeat(filled, masked)]
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) <= 1:
            index = int(np.flatnonzero((values < 0) | (values > 1))[0])
            row = int(np.searchsorted(np.cumsum(own * filled), index, side="right"))
            raise TokenizerError(
                f"row {first_row + row}: {self._column!r} has {values[index]}; expected 0 or 1"
            )
        begins = (documents.ends - lengths)[filled]
        inside = np.ones(len(documents.values), np.bool_)
        if self._adds_bos:
            inside[begins] = False
        ended = documents.ends[filled & (lengths - self._adds_bos > own)] - 1
        inside[ended] = False
        full_mask = np.zeros(len(documents.values), np.uint8)
        full_mask[inside] = values
        full_mask[ended] = full_mask[ended - 1]
        return documents._replace(mask=full_mask)

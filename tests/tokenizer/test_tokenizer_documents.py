"""Rows become documents: text and ids, nulls and slices, ranges, and the ids around each document."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer.definition import TokenizerDefinition, id_dtype
from tokenloom_server.tokenizer.documents import DocumentEncoder, Documents
from tokenloom_server.tokenizer.engine import BytesEngine, Encoded, TokenizersEngine

BOS, EOT = 98, 99
LISTS = st.lists(st.one_of(st.none(), st.lists(st.integers(0, EOT), max_size=6)), max_size=8)
TYPES = [
    pa.uint8(),
    pa.int8(),
    pa.uint16(),
    pa.int16(),
    pa.uint32(),
    pa.int32(),
    pa.uint64(),
    pa.int64(),
]


def _encoder(**options: Any) -> DocumentEncoder:
    return DocumentEncoder(None, **({"vocab_size": 100, "eot_id": EOT} | options))


def _byte_encoder(engine: Any = None, **options: Any) -> DocumentEncoder:
    return DocumentEncoder(engine or BytesEngine(), vocab_size=258, eot_id=256, **options)


#: Of three texts, the second of which is no UTF-8.
BUFFERS = (pa.py_buffer(np.array([0, 2, 4, 5], np.int32)), pa.py_buffer(b"ab\xff\xfec"))


def _rows(documents: Documents) -> list[list[int]]:
    begins = [0, *documents.ends.tolist()]
    assert begins[-1] == len(documents.values)
    return [documents.values[begin:end].tolist() for begin, end in pairwise(begins)]


def _expected(rows: list[list[int] | None], add_bos: bool, add_eot: bool | str) -> list[list[int]]:
    out = []
    for row in rows:
        ids = list(row or [])
        if ids:
            end = [EOT] if add_eot is True or (add_eot == "auto" and ids[-1] != EOT) else []
            ids = [BOS] * add_bos + ids + end
        out.append(ids)
    return out


@pytest.mark.parametrize("vocab_size", [100, 32_000, 128_000])
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eot", [False, True, "auto"])
def test_documents_equal_a_loop_over_rows(
    add_bos: bool, add_eot: bool | str, vocab_size: int
) -> None:
    encoder = _encoder(
        bos_id=BOS if add_bos else None,
        eot_id=EOT if add_eot else None,
        ends_once=add_eot == "auto",
        vocab_size=vocab_size,
    )

    @settings(max_examples=25, deadline=None)
    @given(LISTS, st.data())
    def equal(rows: list[list[int] | None], data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from([pa.list_, pa.large_list]))(
            data.draw(st.sampled_from(TYPES))
        )
        begin = data.draw(st.integers(0, len(rows)))
        length = data.draw(st.integers(0, len(rows) - begin))
        documents = encoder.encode(pa.array(rows, kind).slice(begin, length))
        assert _rows(documents) == _expected(rows[begin : begin + length], add_bos, add_eot)
        assert documents.values.dtype == id_dtype(vocab_size)
        assert documents.ends.dtype == np.int64

    equal()


def test_a_null_row_over_hidden_ids_has_no_tokens() -> None:
    ids = pa.array([1, 2, 500, 3], pa.int32())
    column = pa.ListArray.from_arrays(
        pa.array([0, 2, 3, 4], pa.int32()), ids, mask=pa.array([False, True, False])
    )

    assert _rows(_encoder().encode(column)) == [[1, 2, EOT], [], [3, EOT]]


def test_what_lies_outside_a_slice_is_not_looked_at() -> None:
    column = pa.array([[1000], [1], [None]], pa.list_(pa.int32())).slice(1, 1)

    assert _rows(_encoder().encode(column)) == [[1, EOT]]


def test_a_null_among_the_ids_is_refused_by_its_row() -> None:
    column = pa.array([[1, 2], [], [3, None]], pa.list_(pa.int32()))

    with pytest.raises(TokenizerError, match="row 2: there is a null among the ids"):
        _encoder().encode(column)
    with pytest.raises(TokenizerError, match="row 1002: there is a null"):
        _encoder().encode(column, first_row=1000)


@pytest.mark.parametrize(
    ("kind", "bad", "vocab_size"),
    [
        (pa.int32(), 100, 100),
        (pa.int32(), -1, 100),
        (pa.int64(), 2**40, 100),
        (pa.int64(), -(2**40), 100),
        (pa.uint8(), 100, 100),
        (pa.int8(), -1, 100),
        (pa.int8(), -1, 256),
        (pa.int8(), -128, 70_000),
        (pa.int16(), -1, 65_536),
        (pa.int32(), -1, 2**32),
        (pa.uint64(), 2**63, 2**32),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_by_row_and_value(
    kind: Any, bad: int, vocab_size: int
) -> None:
    column = pa.array([[7], [], None, [1, bad, 2], [bad]], pa.list_(kind))
    message = rf"row 3: the id {bad} is outside the vocabulary \(0 to {vocab_size - 1}\)"

    with pytest.raises(TokenizerError, match=message):
        _encoder(vocab_size=vocab_size).encode(column)


def test_the_greatest_ids_of_each_width_pass() -> None:
    for kind, top in [
        (pa.uint8(), 255),
        (pa.uint16(), 65_535),
        (pa.int64(), 2**32 - 1),
        (pa.uint32(), 2**32 - 1),
    ]:
        documents = _encoder(vocab_size=top + 1, eot_id=None).encode(
            pa.array([[0, top]], pa.list_(kind))
        )
        assert documents.values.tolist() == [0, top]


def test_ids_of_an_engine_are_checked_before_they_are_narrowed() -> None:
    class Wide(BytesEngine):
        def encode(self, texts: pa.LargeStringArray) -> Encoded:
            return Encoded(np.array([1, 70_000], np.uint32), np.array([1, 2]))

    with pytest.raises(TokenizerError, match="row 1: the id 70000 is outside the vocabulary"):
        _byte_encoder(Wide()).encode(pa.array(["a", "b"]))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_text_becomes_documents_with_nulls_and_slices(kind: Any) -> None:
    encoder = _byte_encoder(bos_id=257)
    column = pa.array(["before", "ab", None, "", "é", "after"], kind).slice(1, 4)
    documents = encoder.encode(column)

    assert _rows(documents) == [[257, 97, 98, 256], [], [], [257, 0xC3, 0xA9, 256]]
    assert documents.values.dtype == np.uint16
    assert _rows(encoder.encode(column.slice(0, 0))) == []


def test_a_null_text_over_hidden_characters_has_no_tokens() -> None:
    column = pa.StringArray.from_buffers(3, *BUFFERS, pa.py_buffer(b"\x05"), 1)

    assert _rows(_byte_encoder().encode(column)) == [[97, 98, 256], [], [99, 256]]


def test_text_that_is_not_utf8_is_refused_by_its_row() -> None:
    column, encoder = pa.StringArray.from_buffers(3, *BUFFERS), _byte_encoder()

    with pytest.raises(TokenizerError, match="row 1: the text is not UTF-8"):
        encoder.encode(column)
    with pytest.raises(TokenizerError, match="row 11: the text is not UTF-8"):
        encoder.encode(column.slice(1), first_row=11)
    assert _rows(encoder.encode(column.slice(2))) == [[99, 256]]


def test_auto_does_not_double_an_end_that_parsed_text_brings(
    find: Callable[[str], TokenizerDefinition],
) -> None:
    definition = find("plain")
    engine = TokenizersEngine(definition, "parse")
    encoder = DocumentEncoder(engine, vocab_size=definition.vocab_size, eot_id=0, ends_once=True)
    rows = _rows(encoder.encode(pa.array(["def", "def<|endoftext|>"])))

    assert rows[0] == rows[1]
    assert rows[0][-1] == 0


def test_columns_without_tokens_and_text_without_a_tokeniser_are_refused() -> None:
    for rows, says in (
        ([[1.5]], r"a column of list<item: double> has no tokens; expected text, or lists"),
        ([1], r"a column of int64 has no tokens"),
        (["a"], r"text, but the run has no tokeniser; set tokenizer"),
    ):
        with pytest.raises(TokenizerError, match=says):
            _encoder().encode(pa.array(rows))


def test_ids_in_the_narrow_type_are_not_copied() -> None:
    column = pa.array([[1, 2], [3]], pa.list_(pa.uint8()))
    values = _encoder(eot_id=None).encode(column).values

    assert np.shares_memory(values, column.values.to_numpy())

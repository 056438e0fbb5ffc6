"""The engines, their equality, and the choice between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenloom_server.errors import TokenizerError
from tokenloom_server.tokenizer import engine
from tokenloom_server.tokenizer.choose import (
    CheckedEngine,
    EngineChoice,
    choose_engine,
    load_engine,
    sampled,
)
from tokenloom_server.tokenizer.definition import TokenizerDefinition, find_tokenizer
from tokenloom_server.tokenizer.engine import (
    Encoded,
    GigatokenEngine,
    TokenizersEngine,
    ragged,
)

Find = Callable[[str], TokenizerDefinition]
Choose = Callable[..., EngineChoice]
MODES: tuple[Any, ...] = ("text", "parse")
SUPPORTED = ("plain", "cut", "prefix", "cl100k", "sentencepiece")

PIECES = [
    "<|endoftext|>",
    "<|pad|>",
    "<tool>",
    "@@user@@",
    "<lazy>",
    "  ",
    "\r\n",
    "'LL",
    "é",
    "e\u0301",
    "日本",
    "\u200d",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=12)), max_size=12).map("".join)


def _texts(*texts: str) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def _equal(left: Encoded, right: Encoded) -> bool:
    return np.array_equal(left.values, right.values) and np.array_equal(left.ends, right.ends)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("mode", MODES)
def test_gigatoken_is_chosen_where_it_equals_tokenizers(
    find: Find, choose: Choose, kind: str, mode: Any
) -> None:
    choice = choose(find(kind), mode)

    assert choice.record.engine == "gigatoken"
    assert choice.record.digest == find(kind).digest
    assert "equals tokenizers" in choice.reason


@pytest.fixture(params=[True, False], ids=["few texts", "many texts"])
def _few_or_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """gigatoken is given few texts in another form than many."""
    monkeypatch.setattr(engine, "_FEW_TEXTS", 1000 if request.param else 0)


@pytest.mark.usefixtures("_few_or_many")
@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("mode", MODES)
def test_both_engines_agree_on_any_unicode(find: Find, kind: str, mode: Any) -> None:
    definition = find(kind)
    fast, reference = GigatokenEngine(definition, mode), TokenizersEngine(definition, mode)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(TEXTS, max_size=5))
    def agree(texts: list[str]) -> None:
        column = _texts(*texts)
        found = fast.encode(column)
        assert _equal(found, reference.encode(column))
        assert _equal(found, ragged([reference.encode_one(text) for text in texts]))

    agree()


@pytest.mark.parametrize("make", [GigatokenEngine, TokenizersEngine])
def test_special_strings_are_text_unless_they_are_to_be_parsed(find: Find, make: Any) -> None:
    definition = find("plain")
    text, parse = make(definition, "text"), make(definition, "parse")
    ids = {token.content: token.id for token in definition.added_tokens}

    assert 0 not in text.encode(_texts("a<|endoftext|>b")).values
    assert parse.encode(_texts("a<|endoftext|>b")).values.tolist().count(0) == 1
    for engine_ in (text, parse):
        assert engine_.encode(_texts("<tool>", "@@user@@")).values.tolist() == [
            ids["<tool>"],
            ids["@@user@@"],
        ]


@pytest.mark.parametrize("make", [GigatokenEngine, TokenizersEngine])
def test_what_a_file_cuts_pads_or_adds_is_left_out(find: Find, make: Any) -> None:
    column = _texts("a long text of more than nine tokens, and one more", "x")

    assert _equal(
        make(find("cut"), "text").encode(column), make(find("plain"), "text").encode(column)
    )


@pytest.mark.usefixtures("_few_or_many")
@pytest.mark.parametrize("make", [GigatokenEngine, TokenizersEngine])
def test_rows_stay_in_line_with_empty_ones_and_slices(find: Find, make: Any) -> None:
    engine_ = make(find("plain"), "text")
    column = _texts("before", "", "one two", "", "", "three", "after")
    alone = [engine_.encode(_texts(text)).values.tolist() for text in column.to_pylist()]

    for begin in range(len(column) + 1):
        for length in range(len(column) - begin + 1):
            assert _equal(
                engine_.encode(column.slice(begin, length)), ragged(alone[begin : begin + length])
            )


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("unigram", 'cannot load this tokeniser: Unsupported model type "Unigram"'),
        ("word_piece", 'cannot load this tokeniser: Unsupported model type "WordPiece"'),
        ("lower", "cannot load this tokeniser: Unsupported normalizer type: Lowercase"),
    ],
)
def test_tokenizers_is_used_where_gigatoken_cannot_load(
    find: Find, choose: Choose, kind: str, why: str
) -> None:
    choice = choose(find(kind))

    assert choice.record.engine == "tokenizers"
    assert why in choice.reason
    assert "tokens per CPU-second" in choice.reason
    assert load_engine(find(kind), choice.record, "text").name == "tokenizers"


def test_tokenizers_is_used_where_gigatoken_loads_but_gives_other_ids(
    find: Find, choose: Choose
) -> None:
    choice = choose(find("whole"))

    assert choice.record.engine == "tokenizers"
    assert "gives other ids for the text '  leading, trailing" in choice.reason
    assert re.search(
        r"it costs [0-9.]+ times the CPU time, at [0-9,]+ tokens per CPU-second", choice.reason
    )


def test_a_difference_that_only_real_rows_show_is_found(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.tokenizer.engine_ids.PROBES", ("plain",))
    definition = replace(find("whole"), added_tokens=())
    columns = [pa.array(["word"] * 9), pa.array([None, "", "one,  two"], pa.large_string())]
    choice = choose_engine(definition, "text", columns, cpu_clock_s=time.thread_time)

    assert choice.record.engine == "tokenizers"
    assert "other ids for the text 'one,  two'" in choice.reason


def test_only_a_bounded_part_of_the_sample_is_encoded(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.tokenizer.choose.SAMPLE_BYTES", 1000)
    endless = pa.array(["word " * 300] * 5)
    choice = choose_engine(find("plain"), "text", [endless, endless], cpu_clock_s=time.thread_time)
    probes_only = choose_engine(find("plain"), "text", [], cpu_clock_s=time.thread_time)
    count = [int(choice_.reason.rpartition("(")[2].split()[0]) for choice_ in (choice, probes_only)]

    assert 200 < count[0] - count[1] <= 400


def test_a_changed_file_and_an_unknown_engine_are_refused(find: Find, choose: Choose) -> None:
    record = choose(find("plain")).record

    with pytest.raises(
        TokenizerError,
        match=f"digest {find('prefix').digest}, but the run began with {record.digest}",
    ):
        load_engine(find("prefix"), record, "text")
    with pytest.raises(
        TokenizerError, match="began with the engine 'other', which this server does not have"
    ):
        load_engine(find("plain"), replace(record, engine="other"), "text")


def test_the_check_names_the_row_and_position_that_differ(find: Find) -> None:
    definition = find("whole")
    checked = CheckedEngine(
        GigatokenEngine(definition, "text"), TokenizersEngine(definition, "text"), one_in=1
    )

    with pytest.raises(
        TokenizerError,
        match=r"row 2 of this batch: gigatoken .* differs from tokenizers .* at token ",
    ):
        checked.encode(_texts("same", "", "a,  b", "same"))


def test_the_check_passes_what_is_equal_and_changes_nothing(
    find: Find, choose: Choose, corpus: list[str]
) -> None:
    definition = find("plain")
    record = choose(definition).record
    column = _texts(*corpus[:2], "", "short")
    engines = [
        load_engine(definition, record, "text", check_one_in=one_in) for one_in in (0, 1, 10_000)
    ]
    results = [each.encode(column) for each in engines]

    assert _equal(results[0], results[1])
    assert _equal(results[0], results[2])


def test_checked_documents_are_few_and_the_same_however_rows_are_batched() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 40, 50_000)
    values, ends = rng.integers(0, 1500, lengths.sum()).astype(np.uint32), np.cumsum(lengths)
    picked = sampled(values, ends - lengths, ends, 100)
    cut = 20_001
    tokens = ends[cut - 1]
    again = sampled(values[tokens:], (ends - lengths)[cut:] - tokens, ends[cut:] - tokens, 100)

    assert 400 < picked.sum() < 600
    assert np.array_equal(picked[cut:], again)


def test_gigatoken_is_renewed_when_its_memory_grows_and_the_ids_stay(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_LOOK_EVERY_BYTES", 1)
    fast = GigatokenEngine(find("plain"), "text")
    column = _texts("some text", "some more")
    before, first = fast._backend, fast.encode(column)
    assert fast._backend is before

    monkeypatch.setattr(engine, "RENEW_AFTER_GROWTH_BYTES", -(1 << 40))
    assert _equal(fast.encode(column), first)
    assert fast._backend is not before


def test_gigatoken_is_renewed_by_volume_where_the_system_does_not_tell_its_memory(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_resident_bytes", lambda: None)
    monkeypatch.setattr(engine, "_LOOK_EVERY_BYTES", 4)
    monkeypatch.setattr(engine, "_RENEW_BLINDLY_BYTES", 20)
    fast = GigatokenEngine(find("plain"), "text")
    backends = []
    for _ in range(3):
        fast.encode(_texts("ten bytes!"))
        backends.append(fast._backend)

    assert backends[0] is not backends[1]
    assert backends[1] is backends[2]


def test_a_panic_of_the_engine_is_a_tokeniser_error(find: Find) -> None:
    class PanicException(BaseException):
        """As the one of Rust's bindings, which no module exports."""

    def panic() -> None:
        raise PanicException("range end index out of range\nmore")

    with pytest.raises(
        TokenizerError, match=r"gigatoken [0-9.]+ cannot encode: range end index out of range$"
    ):
        engine._guarded("gigatoken", "encode", panic)
    with pytest.raises(KeyboardInterrupt):
        engine._guarded(
            "gigatoken", "encode", lambda: (_ for _ in ()).throw(KeyboardInterrupt()).__next__()
        )


def test_a_tokeniser_that_cannot_encode_the_text_is_refused_by_name(tmp_path: Path) -> None:
    words = Tokenizer(
        models.WordLevel({"known": 0, "</s>": 1})
    )  # without a token for unknown words
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    found = find_tokenizer("tokenizer.json", tmp_path)

    with pytest.raises(TokenizerError, match=r"tokenizers [0-9.]+ cannot encode: .*UNK"):
        choose_engine(found, "text", [_texts("an unknown word")], cpu_clock_s=time.thread_time)

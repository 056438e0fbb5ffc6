"""JSON lines: what each kind of wrong line is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sources import opened, rows_of
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.jsonl import probe


def written(tmp_path: Path, *rows: str) -> Source:
    (tmp_path / "a.jsonl").write_text("".join(row + "\n" for row in rows))
    return opened(tmp_path, "jsonl:a.jsonl:text")


GOOD = '{"text":"good"}'
GOOD_IDS = '{"text":[1,2]}'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "line 3 is blank, expected a JSON object; remove the line"),
        (" \t", "line 3 is blank, expected a JSON object"),
        ('{"text":"cut', "line 3 is malformed JSON (Unterminated string"),
        (GOOD + GOOD, "line 3 is malformed JSON (Extra data"),
        ('["text"]', "line 3 is a list, expected a JSON object"),
        ('{"Text":"a","id":1}', "line 3 has no key 'text'; its keys are Text, id"),
        ("{}", "line 3 has no key 'text'; its keys are none"),
        ('{"text":12}', "line 3: 'text' is a number, expected a string or a list of integers"),
        ('{"text":{}}', "line 3: 'text' is an object, expected a string"),
        ('{"text":true}', "line 3: 'text' is a boolean, expected a string"),
        ('{"text":[1]}', "line 3: 'text' is a list, but the source's first row holds text"),
        ('{"text":"\\ud800"}', "line 3: 'text' has half of a surrogate pair, which is no character"),
        ('{"text":' + "[" * 100_000, "line 3 is malformed JSON"),
    ],
)
def test_a_wrong_line_of_a_text_source_is_named(tmp_path: Path, bad: str, message: str) -> None:
    source = written(tmp_path, GOOD, GOOD, bad, GOOD)
    assert source.content is Content.TEXT
    with pytest.raises(SourceError) as caught:
        rows_of(source)
    assert f"source 'jsonl:a.jsonl:text': 'a.jsonl': {message}" in str(caught.value)
    assert rows_of(source, 3) == ["good"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"text":[1,2.0]}', "has the number 2.0 among its ids, expected 64-bit integers"),
        ('{"text":[1,null]}', "has null among its ids"),
        ('{"text":[1,true]}', "has a boolean among its ids"),
        ('{"text":["1"]}', "has a string among its ids"),
        ('{"text":[[1]]}', "has a list among its ids"),
        ('{"text":[9223372036854775808]}', "has the number 9223372036854775808 among its ids"),
        ('{"text":"a"}', "is a string, but the source's first row holds ids"),
    ],
)
def test_a_wrong_line_of_an_id_source_is_named(tmp_path: Path, bad: str, message: str) -> None:
    source = written(tmp_path, GOOD_IDS, bad, GOOD_IDS)
    assert source.content is Content.IDS
    with pytest.raises(SourceError) as caught:
        rows_of(source)
    assert f"'a.jsonl': line 2: 'text' {message}" in str(caught.value)
    assert rows_of(source, 2) == [[1, 2]]


def test_ids_keep_their_values_and_null_is_an_empty_row(tmp_path: Path) -> None:
    rows = [None, [], [0, -1, 2**63 - 1, -(2**63)], None, [5]]
    source = written(tmp_path, *(json.dumps({"text": row}) for row in rows))
    assert rows_of(source) == [row or [] for row in rows]


def test_a_malformed_first_line_is_named_when_the_source_is_opened(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"'a\.jsonl': line 1 is malformed JSON"):
        written(tmp_path, "{text}")


def test_a_source_of_nulls_is_refused_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="'text' is null in every row, so there is nothing to read"):
        written(tmp_path, *['{"text":null}'] * 10)
    monkeypatch.setattr(probe, "PROBE_BYTES", 20)
    with pytest.raises(SourceError, match="'text' is null in the first 140 bytes"):
        written(tmp_path, *['{"text":null}'] * 10)

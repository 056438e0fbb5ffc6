"""JSON lines: what each kind of wrong line is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sources import opened, rows_of
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import jsonl
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.storage.file import LocalFile


def written(tmp_path: Path, *rows: str) -> Source:
    (tmp_path / "a.jsonl").write_text("".join(row + "\n" for row in rows))
    return opened(tmp_path, "jsonl:a.jsonl:text", skip_blank=False)


TEXT, IDS = '{"text":"good"}', '{"text":[1,2]}'
#: In a source of such lines, a wrong line and what is said of it.
WRONG = [
    (TEXT, "", " is blank, expected a JSON object; remove the line"),
    (TEXT, " \t", " is blank, expected a JSON object"),
    (TEXT, "\u2003", " is malformed JSON"),
    (TEXT, '{"text":"cut', " is malformed JSON (Unterminated string"),
    (TEXT, TEXT + TEXT, " is malformed JSON (Extra data"),
    (TEXT, '["text"]', " is a list, expected a JSON object"),
    (TEXT, '{"Text":"a","id":1}', " has no key 'text'; its keys are Text, id"),
    (TEXT, "{}", " has no key 'text'; its keys are none"),
    (TEXT, '{"text":12}', ": 'text' is a number, expected a string or a list of integers"),
    (TEXT, '{"text":{}}', ": 'text' is an object, expected a string"),
    (TEXT, '{"text":true}', ": 'text' is a boolean, expected a string"),
    (TEXT, '{"text":[1]}', ": 'text' is a list, but the source's first row holds text"),
    (TEXT, '{"text":"\\ud800"}', ": 'text' has half of a surrogate pair, which is no character"),
    (TEXT, '{"text":' + "[" * 100_000, " is malformed JSON"),
    (
        IDS,
        '{"text":[1,2.0]}',
        ": 'text' has the number 2.0 among its ids, expected 64-bit integers",
    ),
    (IDS, '{"text":[1,null]}', ": 'text' has null among its ids"),
    (IDS, '{"text":[1,true]}', ": 'text' has a boolean among its ids"),
    (IDS, '{"text":["1"]}', ": 'text' has a string among its ids"),
    (IDS, '{"text":[[1]]}', ": 'text' has a list among its ids"),
    (
        IDS,
        '{"text":[9223372036854775808]}',
        ": 'text' has the number 9223372036854775808 among its ids",
    ),
    (IDS, '{"text":"a"}', ": 'text' is a string, but the source's first row holds ids"),
]


def test_a_wrong_line_is_named_and_those_after_it_can_be_read(tmp_path: Path) -> None:
    for good, wrong, message in WRONG:
        source = written(tmp_path, good, good, wrong, good)
        assert source.content is (Content.TEXT if good == TEXT else Content.IDS)
        with pytest.raises(SourceError) as caught:
            rows_of(source)
        assert f"source 'jsonl:a.jsonl:text': 'a.jsonl': line 3{message}" in str(caught.value)
        assert rows_of(source, 3) == [json.loads(good)["text"]]


def test_the_keys_of_a_file_that_begins_with_blank_lines_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n \n" + TEXT + "\n")
    assert rows_of(opened(tmp_path, "jsonl:a.jsonl:text")) == ["", "", "good"]
    with LocalFile(tmp_path / "a.jsonl", "a") as file:
        assert jsonl.columns_of(file, "a.jsonl") == {"text": Content.TEXT}


def test_ids_keep_their_values_and_null_is_an_empty_row(tmp_path: Path) -> None:
    rows = [None, [], [0, -1, 2**63 - 1, -(2**63)], None, [5]]
    source = written(tmp_path, *(json.dumps({"text": row}) for row in rows))
    assert rows_of(source) == [row or [] for row in rows]


def test_a_malformed_first_line_is_named_when_the_source_is_opened(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"'a\.jsonl': line 1 is malformed JSON"):
        written(tmp_path, "{text}")


def test_a_source_of_nulls_is_refused_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        SourceError, match="'text' is null in every row, so there is nothing to read"
    ):
        written(tmp_path, *['{"text":null}'] * 10)
    monkeypatch.setattr(jsonl, "PROBE_BYTES", 20)
    with pytest.raises(SourceError, match="'text' is null in the first 140 bytes"):
        written(tmp_path, *['{"text":null}'] * 10)

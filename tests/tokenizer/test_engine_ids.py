"""What an engine gives is recorded: one that gives the same serves the run, and any other is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import parsed, write_jsonl
from tokenloom_proto.seal import canonical
from tokenloom_server.errors import SnapshotInvalid, TokenizerError
from tokenloom_server.order import builder, snapshot
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.snapshot import compose
from tokenloom_server.order.state_document import encode_state
from tokenloom_server.tokenizer.definition import TokenizerDefinition
from tokenloom_server.tokenizer.engine import GigatokenEngine, TokenizersEngine
from tokenloom_server.tokenizer.engine_ids import PROBES, EngineIds

DOCS, MORE = "jsonl:docs.jsonl:text", "jsonl:more-*.jsonl:text"
MIXTURE: dict[str, Any] = {
    "run": "words",
    "seed": 7,
    "tokenizer": "plain.json",
    "sequence_length": 16,
    "mixture": {"policy": "least_consumed", "children": [{"source": DOCS}, {"source": MORE}]},
}


@pytest.fixture
def place(tmp_path: Path, folder: Path, corpus: list[str]) -> Path:
    """A mixture's folder: files of several blocks, and a byte-level tokeniser."""
    shutil.copy(folder / "plain.json", tmp_path)
    lines = [line for text in corpus for line in text.splitlines()]
    write_jsonl(tmp_path / "docs.jsonl", lines[:900])
    write_jsonl(tmp_path / "more-0.jsonl", ["a short file"])
    write_jsonl(tmp_path / "more-1.jsonl", lines[900:])
    return tmp_path


def _recorded(made: PipelineFactory, **fields: Any) -> str:
    """A run's record with other fields of its tokeniser, as another server would have written it."""
    document = json.loads(made.record.to_json())
    return canonical(document | {"tokenizer": document["tokenizer"] | fields})


def _digest(factory: PipelineFactory) -> int:
    pipeline = factory.pipeline(factory.initial())
    pipeline.advance(300)
    return pipeline.state().digest


@pytest.mark.parametrize(
    ("engine", "serves"), [("gigatoken", "gigatoken"), ("tokenizers", "tokenizers")]
)
def test_another_version_that_gives_the_same_ids_serves_the_run_and_says_so(
    place: Path, caplog: pytest.LogCaptureFixture, engine: str, serves: str
) -> None:
    caplog.set_level(logging.INFO)
    made = builder.create(parsed(MIXTURE), place, None)
    record = _recorded(made, engine=engine, version="0.0.1")

    loaded = builder.load(parsed(MIXTURE), place, None, record)

    assert loaded.record.serving_engine.engine == serves
    assert loaded.record.to_json() == record
    assert _digest(loaded) == _digest(made)
    (line,) = [message for message in caplog.messages if "began with" in message]
    assert f"the run began with {engine} 0.0.1; this gives the same ids for" in line


def test_a_state_goes_on_in_a_new_ledger_under_another_engine_that_gives_the_same_ids(
    place: Path,
) -> None:
    made = builder.create(parsed(MIXTURE), place, None)
    here = made.record.template("u", "train", 1)
    resume_state = encode_state(made.initial(), made.record.shape)
    there = here | {"tokenizer": here["tokenizer"] | {"engine": "tokenizers", "version": "0.0.1"}}

    point = snapshot.parse(
        compose(there, resume_state, resume_state), here, lambda *_: made.record.shape, made.config
    )

    assert point.base == made.initial()
    for changed in (
        {"engine_ids": "0" * 32},
        {"tokenizer": there["tokenizer"] | {"digest": "0" * 64}},
    ):
        text = compose(there | changed, resume_state, resume_state)
        with pytest.raises(SnapshotInvalid, match="the snapshot's tokenizer is"):
            snapshot.parse(text, here, lambda *_: made.record.shape, made.config)


def test_an_engine_that_gives_other_ids_is_refused_with_the_first_text_that_shows_it(
    place: Path,
) -> None:
    made = builder.create(parsed(MIXTURE), place, None)
    record = json.loads(_recorded(made, version="0.0.1"))
    ids = record["engine_ids"]
    for changed, says in (
        (
            {"probes": [*ids["probes"][:3], "0" * 16, *ids["probes"][4:]]},
            r"for the text 'tab\\tnew",
        ),
        (
            {"added_tokens": ["0" * 16, *ids["added_tokens"][1:]]},
            r"for texts with '<\|endoftext\|>'",
        ),
        (
            {"sources": [ids["sources"][0], [1, ["0" * 16]]]},
            rf"for rows 0 to 0 of {MORE.replace('*', '.')}",
        ),
    ):
        text = canonical(record | {"engine_ids": ids | changed})
        expected = rf"began with gigatoken 0.0.1, but .* gives other ids {says}.*; tokenizers .* gives other"
        with pytest.raises(TokenizerError, match=expected):
            builder.load(parsed(MIXTURE), place, None, text)


def test_a_record_without_what_its_engine_gave_opens_with_that_engine_alone(place: Path) -> None:
    made = builder.create(parsed(MIXTURE), place, None)
    older = {
        key: value
        for key, value in json.loads(made.record.to_json()).items()
        if key != "engine_ids"
    }

    assert _digest(builder.load(parsed(MIXTURE), place, None, canonical(older))) == _digest(made)
    older["tokenizer"] |= {"version": "0.0.1"}
    with pytest.raises(TokenizerError, match=r"began with gigatoken 0.0.1, but .* is installed"):
        builder.load(parsed(MIXTURE), place, None, canonical(older))


def test_both_engines_have_equal_digests_where_their_ids_are_equal(
    find: Callable[[str], TokenizerDefinition], rows: Any
) -> None:
    plain, whole = find("plain"), find("whole")
    columns = [rows, rows.slice(0, 0)]
    fast, slow = (
        [
            EngineIds.of(kind(definition, "text"), definition, columns)
            for kind in (GigatokenEngine, TokenizersEngine)
        ]
        for definition in (plain, whole)
    )

    assert fast[0] == fast[1]
    assert slow[0] != slow[1]
    assert len(fast[0].probes) == len(PROBES)
    assert [source.rows for source in fast[0].sources] == [len(rows), 0]
    assert EngineIds.from_json(json.loads(json.dumps(fast[0]._asdict()))) == fast[0]

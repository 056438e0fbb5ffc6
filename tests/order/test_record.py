"""What a run's order is made of: frozen when it begins, and honoured or refused ever after."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import (
    CODE,
    DOCS,
    WIKI,
    flat,
    mixture,
    order_of,
    parsed,
    write_corpus,
)
from support.golden_rows import write_golden_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenloom_proto.seal import canonical
from tokenloom_server.errors import (
    ConfigError,
    LedgerError,
    SourceChanged,
    TokenizerError,
)
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.notes import begin_notes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


def load(folder: Path, record: str, document: dict[str, Any] | None = None) -> PipelineFactory:
    return builder.load(parsed(document or mixture()), folder, None, record)


def digest_of(order: PipelineFactory, samples: int = 40) -> int:
    pipeline = order.pipeline(order.initial())
    pipeline.advance(samples)
    return pipeline.state().digest


def write_tokenizer(path: Path, end_of_text: int) -> None:
    """A word-level tokeniser of digits, whose end of text has the given id."""
    names = [f"w{i}" for i in range(300)]
    names[end_of_text] = "<|endoftext|>"
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def test_an_order_comes_back_from_its_record(folder: Path) -> None:
    made = order_of(folder)
    loaded = load(folder, made.record.to_json())
    assert loaded.record.to_json() == made.record.to_json()
    assert loaded.record.template("u", "train", 1) == made.record.template("u", "train", 1)
    assert digest_of(loaded) == digest_of(made)


def test_the_record_holds_what_decides_the_order_and_nothing_of_this_machine(folder: Path) -> None:
    record = order_of(folder).record.to_json()
    assert str(folder) not in record
    assert set(json.loads(record)) == {
        "format",
        "order_version",
        "config",
        "beside",
        "tokenizer",
        "vocab_size",
        "manifest",
    }
    assert canonical(json.loads(record)) == record


def test_a_run_moves_with_its_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = order_of(folder)
    expected = digest_of(made)
    moved = tmp_path_factory.mktemp("moved") / "corpus"
    folder.rename(moved)
    assert digest_of(load(moved, made.record.to_json())) == expected


def child(document: dict[str, Any], position: int) -> dict[str, Any]:
    found = document["mixture"]["children"][position]
    assert isinstance(found, dict)
    return found


#: By the number of a child, or None for the run: other fields; and what is said of them.
DIFFERENT: dict[str, tuple[dict[int | None, dict[str, Any]], list[str]]] = {
    "seed": ({None: {"seed": 8}}, ["seed: the run began with 7, the file has 8"]),
    "length": (
        {None: {"sequence_length": 9}},
        ["sequence_length: the run began with 8, the file has 9"],
    ),
    "labels": (
        {None: {"labels": "shifted"}},
        ['labels: the run began with "same", the file has "shifted"'],
    ),
    "weight": (
        {0: {"weight": 2.5}},
        ['mixture.children.0.weight: the run began with "2", the file has "2.5"'],
    ),
    "several": (
        {1: {"epochs": 3}, 2: {"policy": "least_consumed"}, None: {"seed": 1}},
        [
            'mixture.children.1.epochs: the run began with "2", the file has "3"',
            'mixture.children.2.policy: the run began with "weighted", the file has "least_consumed"',
            "seed: the run began with 7, the file has 1",
        ],
    ),
    "a source less": (
        {},
        [
            f"mixture.children: the run began with 3: {CODE}, {DOCS}, weighted, the file has 2: {CODE}, weighted"
        ],
    ),
    "another spec": (
        {1: {"source": "jsonl:data/docs.jsonl:body"}},
        [
            f'mixture.children.1.source: the run began with "{DOCS}", the file has "jsonl:data/docs.jsonl:body"'
        ],
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_mixture_file_that_differs_is_refused_with_each_field_and_both_values(
    folder: Path, what: str
) -> None:
    changes, lines = DIFFERENT[what]
    document = mixture()
    for number, fields in changes.items():
        (document if number is None else child(document, number)).update(fields)
    if not changes:
        document["mixture"]["children"].pop(1)
    with pytest.raises(ConfigError) as caught:
        load(folder, order_of(folder).record.to_json(), document)
    first, *found, last = str(caught.value).splitlines()
    assert first == "the mixture file of run 'test' differs from what the run began with:"
    assert [line.strip() for line in found] == lines
    assert last.startswith("put these back, or begin a new run under another name (`run`)")


def test_what_does_not_touch_the_order_may_change(folder: Path) -> None:
    document = mixture(window_micro_steps=9, last_micro_step="pad")
    child(document, 0)["alias"] = "other"
    child(document, 2)["alias"] = "others"
    made = order_of(folder)
    loaded = load(folder, made.record.to_json(), document)
    assert digest_of(loaded) == digest_of(made)
    assert loaded.resources.changed == (
        'last_micro_step: was "drop", the file has "pad" now',
        'mixture.children.2: alias: was "rest", the file has "others" now',
        f'{CODE}: alias: was "code", the file has "other" now',
        "window_micro_steps: was nothing, the file has 9 now",
    )


@pytest.mark.parametrize(("field", "ours"), [("format", 1), ("order_version", 3)])
@pytest.mark.parametrize("value", [0, 2, 4, None, "3"])
def test_a_record_of_another_version_is_refused(
    folder: Path, field: str, ours: int, value: Any
) -> None:
    record = json.loads(order_of(folder).record.to_json())
    assert record[field] == ours
    with pytest.raises(
        LedgerError,
        match=f"its record has {field} {value!r}, this release has {ours}: serve it with",
    ):
        load(folder, json.dumps(record | {field: value}))


def rewrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "rewritten with the same size": ("data/docs.jsonl", rewrite),
    "appended to": ("data/prose/1.txt", lambda path: path.write_text(path.read_text() + "1\n")),
    "truncated": ("data/code-1.parquet", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    "emptied": ("data/prose/0.txt", lambda path: path.write_bytes(b"")),
    "deleted": ("data/code-0.parquet", lambda path: path.unlink()),
    "renamed": ("data/docs.jsonl", lambda path: path.rename(path.with_name("other.jsonl"))),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_changed_file_is_refused_by_name(folder: Path, what: str) -> None:
    record = order_of(folder).record.to_json()
    name, damage = DAMAGE[what]
    damage(folder / name)
    with pytest.raises(SourceChanged, match=name):
        load(folder, record)


def test_files_that_appear_later_only_warn(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = order_of(folder)
    (folder / "data/prose/2.txt").write_text("1 2 3\n")
    with caplog.at_level(logging.WARNING):
        loaded = load(folder, made.record.to_json())
    assert "data/prose/2.txt appeared after the run began and is not read" in caplog.text
    assert digest_of(loaded, 10**6) == digest_of(made, 10**6)


def test_another_end_of_text_is_refused_also_where_every_source_holds_ids(folder: Path) -> None:
    document = flat([CODE, WIKI], tokenizer="tokenizer.json")
    write_tokenizer(folder / "tokenizer.json", 280)
    made = order_of(folder, document)
    assert json.loads(made.record.to_json())["tokenizer"]["engine"] == "none"
    load(folder, made.record.to_json(), document)
    write_tokenizer(folder / "tokenizer.json", 281)
    assert digest_of(order_of(folder, document)) != digest_of(made)
    with pytest.raises(TokenizerError, match="put the old files back, or begin a new run"):
        load(folder, made.record.to_json(), document)


def test_text_without_a_tokeniser_is_refused(folder: Path) -> None:
    document = flat([CODE, DOCS]) | {"vocab_size": 300, "end_of_text_id": 299}
    del document["tokenizer"]
    with pytest.raises(ConfigError, match=f"tokenizer: is missing, but '{DOCS}' holds text"):
        order_of(folder, document)


def test_a_vocabulary_smaller_than_the_tokenisers_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size: 257 is smaller than the tokeniser's 258"):
        order_of(folder, mixture(vocab_size=257))


@pytest.mark.parametrize(
    ("vocab", "width"), [(256, 1), (257, 2), (2**16, 2), (2**16 + 1, 4), (2**32, 4)]
)
def test_ids_travel_in_the_narrowest_type(folder: Path, vocab: int, width: int) -> None:
    document = flat([CODE], labels="shifted") | {"vocab_size": vocab, "end_of_text_id": vocab - 1}
    del document["tokenizer"]
    order = order_of(folder, document)
    assert order.record.dtype.itemsize == width
    assert order.form.sample_bytes == 9 * width


def test_a_mixture_that_no_phase_leaves_in_force_gives_a_warning(folder: Path) -> None:
    own = {"policy": "least_consumed", "children": [{"source": CODE}]}
    (known,) = {
        len(builder.warnings(order_of(folder, mixture(phases=phases)))) for phases in ([], [{}])
    }
    *_, warning = found = builder.warnings(order_of(folder, mixture(phases=[{"mixture": own}])))
    assert len(found) == known + 1
    assert warning.startswith(
        "mixture: is never in force, for phases.0 begins with the first token"
    )
    later = [{"until_tokens": 64}, {"mixture": own}]
    assert len(builder.warnings(order_of(folder, mixture(phases=later)))) == known


def test_pipelines_of_one_order_are_independent(folder: Path) -> None:
    order = order_of(folder)
    one, other = order.pipeline(order.initial()), order.pipeline(order.initial())
    for _ in range(20):
        one.advance(1)
        other.advance(2)
    assert digest_of(order, 20) == one.state().digest
    assert digest_of(order, 40) == other.state().digest


def test_ids_need_no_end_of_text_id_where_none_is_added(folder: Path) -> None:
    (folder / "ids.jsonl").write_text('{"ids": [1, 2, 3]}\n' * 40)
    document = flat(["jsonl:ids.jsonl:ids"], sequence_length=8, vocab_size=9, add_eot=False)
    del document["tokenizer"]

    assert order_of(folder, document).record.end_of_text_id is None
    with pytest.raises(
        ConfigError, match="give vocab_size instead, and end_of_text_id unless add_eot is false"
    ):
        order_of(folder, document | {"add_eot": True})


def test_a_begin_that_the_tokeniser_itself_would_add_and_the_run_does_not_is_said(
    folder: Path,
) -> None:
    write_golden_rows(folder)
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    begin = {"id": "<|begin|>", "ids": [276], "tokens": ["<|begin|>"]}
    single = [
        {"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|begin|>": begin},
    }
    document = flat(
        ["jsonl:data/good.jsonl:text", "parquet:data/marked.parquet:ids"], tokenizer="tokenizer"
    )

    assert begin_notes(order_of(folder, document)) == []
    file.write_text(json.dumps(content))
    ((warns, note),) = begin_notes(order_of(folder, document))
    assert warns and note.startswith(
        "jsonl:data/good.jsonl:text: the tokeniser itself begins a text with [276]"
    )
    assert begin_notes(order_of(folder, document | {"add_bos": True})) == []

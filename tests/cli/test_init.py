"""``tokenloom init``: from a folder to a file that is valid, and to commands that work as they are printed."""

from __future__ import annotations

import gzip
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.corpora import write_corpus
from support.hub import card, stand_in_hub
from tokenloom_tools.cli import init as init_command
from tokenloom_tools.cli.app import app
from tokenloom_tools.cli.init import SCHEMA_FILE
from typer.testing import CliRunner

TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer"

#: Longer than the imports take on a busy machine.
DEADLINE_S = 110.0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``data`` in it."""
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str, status: int = 0) -> str:
    """What the command prints where nobody can be asked."""
    done = CliRunner().invoke(app, ["init", *arguments])
    assert done.exit_code == status, done.output
    return done.output


def written(path: str = "mixture.yaml") -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return document


def test_it_writes_a_file_of_all_that_there_is_which_is_valid_for_the_server_and_for_editors(
    here: Path,
) -> None:
    output = init("data", "--tokenizer", "bytes")
    text = Path("mixture.yaml").read_text(encoding="utf-8")
    document = written()
    children = {child["alias"]: child for child in document["mixture"]["children"]}
    assert {alias: child["source"] for alias, child in children.items()} == {
        "wiki": "arrow:data/wiki:ids",
        "prose": "txt:data/prose/*.txt:file",
        "code": "parquet:data/code-*.parquet:ids",
        "docs": "jsonl:data/docs.jsonl:text",
    }
    planned = json.loads(CliRunner().invoke(app, ["plan", "mixture.yaml", "--json"]).stdout)
    tokens = {source["alias"]: source["tokens_per_epoch"] for source in planned["sources"]}
    total = sum(tokens.values())
    assert {alias: child["weight"] for alias, child in children.items()} == {
        alias: pytest.approx(own / total, rel=0.01) for alias, own in tokens.items()
    }
    assert "tokeniser: bytes, 258 ids" in output
    assert document["run"] == "data"
    assert all(each["source"] in output for each in children.values())
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")
    Draft202012Validator(json.loads(Path(SCHEMA_FILE).read_text())).validate(document)
    checked = CliRunner().invoke(app, ["validate", "mixture.yaml"])
    assert checked.exit_code == 0, checked.output


def test_nothing_is_written_over_unless_it_is_asked_for(here: Path) -> None:
    init("data", "--tokenizer", "bytes")
    before = Path("mixture.yaml").read_bytes()
    assert "mixture.yaml: is there already" in init(
        "data", "--tokenizer", "bytes", "--run", "b", status=2
    )
    assert Path("mixture.yaml").read_bytes() == before
    # The schema is as it was, so it is in nobody's way.
    init("data", "--tokenizer", "bytes", "--output", "other.yaml")
    Path(SCHEMA_FILE).write_text("mine")
    refused = init("data", "--tokenizer", "bytes", "--output", "third.yaml", status=2)
    assert f"{SCHEMA_FILE}: is there already" in refused
    assert not Path("third.yaml").exists()
    assert "expected a file, in a folder that exists" in init(
        "data", "--output", "no/a.yaml", status=2
    )
    assert "the schema for editors has this name" in init(
        "data", "--output", SCHEMA_FILE, "--force", status=2
    )
    init("data", "--tokenizer", "bytes", "--run", "b", "--force")
    assert written()["run"] == "b"


def test_what_does_not_show_is_said_with_its_option_and_nothing_is_written(here: Path) -> None:
    assert "no tokenizer.json beside or above the data: give --tokenizer" in init("data", status=2)
    (here / "two").mkdir()
    rows = json.dumps({"id": 1, "text": "a", "content": "b", "score": 0.5}) + "\n"
    (here / "two" / "rows.jsonl").write_text(rows * 2000)
    refused = init("two", "--tokenizer", "bytes", status=2)
    assert (
        "its columns are id, text, content, score, and text and content may be meant; give --column rows="
        in refused
    )
    assert not Path("mixture.yaml").exists()
    init("two", "--tokenizer", "bytes", "--column", "rows=content", "--sequence-length", "64")
    assert (written()["mixture"]["children"][0]["source"], written()["sequence_length"]) == (
        "jsonl:two/rows.jsonl:content",
        64,
    )


def test_a_source_has_the_name_of_its_folder_and_the_run_that_of_its_file(here: Path) -> None:
    rows = (here / "data" / "docs.jsonl").read_bytes()
    for name in (
        "books/en/part-000",
        "code/part-000",
        "web/2024/part-000",
        "web/2025/part-000",
        "books-1",
        "books-2",
    ):
        (here / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "all" / f"{name}.jsonl").write_bytes(rows)
    init("all", "--tokenizer", "bytes", "--column", "web=text")
    assert {child["alias"]: child["source"] for child in written()["mixture"]["children"]} == {
        "en/part-000": "jsonl:all/books/en/part-000.jsonl:text",
        "code": "jsonl:all/code/part-000.jsonl:text",
        "web": "jsonl:all/web/**/*.jsonl:text",
        "books": "jsonl:all/books-*.jsonl:text",
    }
    shutil.rmtree("all/code")
    for path in Path("all").glob("*.jsonl"):
        path.unlink()
    init("all", "--tokenizer", "bytes", "--force")
    assert [child["alias"] for child in written()["mixture"]["children"]] == ["books", "web"]
    init("all/web/2024/part-000.jsonl", "--tokenizer", "bytes", "--force")
    assert written()["run"] == "part-000"


def test_a_folder_is_no_output_and_a_column_is_that_of_a_source_that_there_is(here: Path) -> None:
    assert "--output data: expected a file" in init("data", "--output", "data", "--force", status=2)
    refused = init("data", "--tokenizer", "bytes", "--column", "kode=ids", status=2)
    assert "--column kode=…: no source has this alias; expected one of" in refused


def test_files_that_differ_by_their_compression_alone_are_one_source_and_which_is_asked(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (here / "data" / "docs.jsonl").read_bytes()
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl", "b.jsonl.gz", "c.jsonl", "c.txt"):
        (here / "two" / name).parent.mkdir(exist_ok=True)
        (here / "two" / name).write_bytes(gzip.compress(rows) if name.endswith(".gz") else rows)
    shutil.copytree(TOKENIZER, here / "two", dirs_exist_ok=True)
    refused = init("two", status=2)
    pair = "two/a.jsonl and two/a.jsonl.gz (and 1 more such pairs) may be the same data"
    assert f"{pair}: move one of them away, or name the files to init" in refused

    answers = {"the one that is read": "two/a.jsonl.gz"}
    monkeypatch.setattr(
        init_command,
        "_ask",
        lambda question, default="", missing="": next(
            (answer for name, answer in answers.items() if name in question), default
        ),
    )
    output = init("two")
    assert {child["source"].partition(":")[2] for child in written()["mixture"]["children"]} == {
        "two/c.jsonl:text",
        "two/c.txt:text",
        "two/a.jsonl.gz:text",
        "two/b.jsonl.gz:text",
    }
    assert written()["tokenizer"] == "two/tokenizer.json"
    left_out = output.partition("left out: ")[2].splitlines()[0]
    assert "two/a.jsonl (the same as two/a.jsonl.gz)" in left_out and "tokenizer" not in left_out
    answers["the one that is read"] = "two/c.jsonl"
    assert f"{pair}: found 'two/c.jsonl', expected one of them" in init("two", "--force", status=2)


def test_what_is_no_file_or_empty_is_left_out_and_a_folder_named_twice_is_one(here: Path) -> None:
    (here / "odd").mkdir()
    os.mkfifo(here / "odd" / "pipe.jsonl")
    (here / "odd" / "broken.jsonl").symlink_to(here / "absent")
    (here / "odd" / "nothing.jsonl").touch()
    (here / "odd" / "docs.jsonl").write_bytes((here / "data" / "docs.jsonl").read_bytes())
    refused = init("odd", "--tokenizer", "bytes", status=2)
    assert f"'odd/broken.jsonl' is a link to '{here / 'absent'}', where no file is" in refused
    (here / "odd" / "broken.jsonl").unlink()
    (here / "odd" / "web-1-of-3.jsonl").write_bytes((here / "data" / "docs.jsonl").read_bytes())
    output = init("odd", "odd", "--tokenizer", "bytes")
    assert "warning: source 'odd/web-1-of-3.jsonl': 2 of the 3 files" in output
    (here / "odd" / "web-1-of-3.jsonl").unlink()
    output = init("odd", "odd", "--tokenizer", "bytes", "--force")
    assert [child["alias"] for child in written()["mixture"]["children"]] == ["docs"]
    assert all(f"odd/{name}.jsonl (" in output for name in ("pipe", "nothing"))
    (here / "odd" / "docs.jsonl").write_bytes(b"")
    assert "has no data that a scheme reads" in init(
        "odd", "--tokenizer", "bytes", "--output", "b.yaml", status=2
    )


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("absent", "cannot be looked at (No such file"),
        ("empty", "(it is empty); expected"),
        ("code", "(code/a.py"),
    ],
)
def test_a_folder_without_data_is_refused_with_what_is_there(
    here: Path, folder: str, says: str
) -> None:
    (here / "empty").mkdir()
    (here / "code").mkdir()
    (here / "code" / "a.py").touch()
    assert says in init(folder, "--tokenizer", "bytes", status=2)


def test_a_tokeniser_above_the_data_is_taken_and_paths_outside_the_files_folder_are_absolute(
    here: Path,
) -> None:
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(
        "tokenizer.json"
    )
    init("data/prose", "--output", "mixture.yaml")
    assert written()["tokenizer"] == "tokenizer.json"
    (here / "runs").mkdir()
    init("data/prose", "--output", "runs/mixture.yaml")
    assert written("runs/mixture.yaml")["tokenizer"] == f"{here}/tokenizer.json"
    assert (
        written("runs/mixture.yaml")["mixture"]["children"][0]["source"]
        == f"txt:{here}/data/prose/*.txt:text"
    )


def test_at_a_terminal_it_asks(here: Path) -> None:
    ours, theirs = pty.openpty()
    command = [Path(sys.executable).with_name("tokenloom"), "init", "data/prose"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    os.close(theirs)
    os.write(ours, b"my-run\nbytes\nmany\n16\n")
    output, _ = process.communicate(timeout=DEADLINE_S)
    os.close(ours)
    assert process.returncode == 0, output
    assert (written()["run"], written()["tokenizer"], written()["sequence_length"]) == (
        "my-run",
        "bytes",
        16,
    )


def test_of_the_hub_the_splits_to_train_on_are_sources(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (here / "data" / "docs.jsonl").read_bytes()
    names = [f"{config}/{split}.jsonl" for config in ("en", "de") for split in ("train", "test")]
    with stand_in_hub() as hub:
        hub.stand_in(monkeypatch, here / "cache")
        hub.repo("org/plain").commit({"train.jsonl": rows, "test.jsonl": rows})
        configs = [{"config_name": name, "data_dir": name} for name in ("en", "de")]
        hub.repo("org/several").commit({"README.md": card(*configs), **dict.fromkeys(names, rows)})
        output = init(
            "hf:org/plain", "hf:org/several/de", "--tokenizer", "bytes", "--sequence-length", "8"
        )
        assert [child["source"] for child in written()["mixture"]["children"]] == [
            "hf:org/plain:train:text",
            "hf:org/several/de:train:text",
        ]
        assert "org/plain:test (a split to evaluate on)" in output
        assert "has the configs en, de; name one, as hf:org/several/CONFIG" in init(
            "hf:org/several", "--force", status=2
        )
        checked = CliRunner().invoke(app, ["validate", "mixture.yaml"])
        assert checked.exit_code == 0, checked.output
    assert "txt:data: expected a folder, without a scheme" in init("txt:data", "--force", status=2)


WORDS = "so it was said by all who were there"


@pytest.mark.parametrize(
    ("files", "row", "documents"),
    [
        ({"1": f"{WORDS}\n{WORDS}\n\n{WORDS}\n" * 9, "2": f"{WORDS}\n" * 20}, "file", 2),
        ({"a": f"{WORDS}\n{WORDS}\n\n" * 9}, "paragraph", 9),
        ({"1": (WORDS * 9 + "\n") * 7, "2": (WORDS * 9 + "\n") * 7}, "text", 14),
        ({"a": f"{WORDS}\n" * 30}, "text", 30),
    ],
    ids=["books", "one file of paragraphs", "documents by line", "one file of short lines"],
)
def test_what_of_plain_text_is_a_document_shows_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], row: str, documents: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name, text in files.items():
        Path(f"texts/{name}.txt").write_text(text)
    output = init("texts", "--tokenizer", "bytes", "--sequence-length", "8")
    assert {child["source"].rpartition(":")[2] for child in written()["mixture"]["children"]} == {
        row
    }
    assert f"about {documents} documents of" in output
    init(
        "texts",
        "--tokenizer",
        "bytes",
        "--sequence-length",
        "8",
        "--column",
        "paragraph",
        "--force",
    )
    assert written()["mixture"]["children"][0]["source"].endswith(":paragraph")


SAID = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]


@pytest.mark.parametrize(
    ("row", "column", "fields"),
    [
        (
            {"conversations": [{"from": "human", "value": WORDS}, {"from": "gpt", "value": WORDS}]},
            "conversations",
            {"template": "chat", "chat_format": "sharegpt", "loss_on": "answers"},
        ),
        (
            {"instruction": WORDS, "input": "", "output": WORDS},
            "output",
            {"template": "chat", "chat_format": "alpaca", "loss_on": "answers"},
        ),
        (
            {"prompt": SAID[:1], "completion": SAID[1:]},
            "completion",
            {"template": "chat", "chat_format": "prompt_completion", "loss_on": "answers"},
        ),
        (
            {"prompt": WORDS, "completion": WORDS},
            "completion",
            {"template": "{prompt}{completion}", "loss_on": "completion"},
        ),
    ],
)
def test_conversations_are_recognised_by_their_columns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
    column: str,
    fields: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(f"{json.dumps({'id': 'a'} | row)}\n" * 40)
    output = init("chats.jsonl", "--tokenizer", str(TOKENIZER), "--sequence-length", "256")
    document = written()
    (child,) = document["mixture"]["children"]
    assert child["source"].endswith(f":{column}") and document["packing"] == "best_fit"
    assert {name: child.get(name) for name in ("template", "chat_format", "loss_on")} == {
        "chat_format": None
    } | fields
    assert "about 40 documents" in output


def test_conversations_are_rendered_by_the_tokenisers_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': SAID})}\n" * 40)
    init("chats.jsonl", "--tokenizer", str(TOKENIZER), "--sequence-length", "256")
    document = written()
    (child,) = document["mixture"]["children"]
    assert (document["packing"], child["template"]) == ("best_fit", "chat")
    assert (child["loss_on"], "chat_format" in child) == ("answers", False)
    assert child["source"].endswith(":messages")
    init("chats.jsonl", "--tokenizer", "bytes", "--column", "messages.role", "--force")
    assert written()["mixture"]["children"][0]["source"].endswith(":messages.role")
    Path("texts.jsonl").write_text('{"messages": "a text", "id": 1}\n' * 40)
    init("texts.jsonl", "--tokenizer", "bytes", "--force")
    assert "packing" not in written()


def test_a_folder_of_mixed_chats_and_books_is_what_each_of_them_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data/chat", "data/books"):
        Path(folder).mkdir(parents=True)
    turns = [{"from": "human", "value": WORDS}, {"from": "gpt", "value": WORDS}]
    for number in range(2):
        Path(f"data/chat/chat{number}.jsonl").write_text(f"{json.dumps({'messages': SAID})}\n" * 40)
        Path(f"data/chat/sharegpt{number}.jsonl").write_text(
            f"{json.dumps({'conversations': turns})}\n" * 40
        )
        Path(f"data/books/book{number}.txt").write_text(f"{WORDS}\n{WORDS}\n\n" * 40)
    for tokenizer, fault in ((str(TOKENIZER), ""), ("bytes", "name one that has: a folder")):
        output = init("data", "--tokenizer", tokenizer, "--sequence-length", "256", "--force")
        children = written()["mixture"]["children"]
        columns = {
            child["source"].partition(":data/")[2]: child.get("chat_format") for child in children
        }
        assert columns == {
            "books/*.txt:file": None,
            "chat/chat*.jsonl:messages": None,
            "chat/sharegpt*.jsonl:conversations": "sharegpt",
        }
        assert fault in output and ("no run can begin" in output) == bool(fault)


def test_weights_are_of_bytes_and_it_says_so_where_tokens_cannot_be_estimated(here: Path) -> None:
    Path("data/docs.jsonl").write_text('{"text": "a"}\n{"text": \n')
    output = init("data", "--tokenizer", "bytes", "--column", "docs=text")
    assert "warning: no run can begin with this yet: " in output
    assert "Until then weights are the parts of the bytes on disk" in output
    assert "data/docs.jsonl" in output

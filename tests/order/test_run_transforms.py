"""``transform``: a user's function makes one text of each during a run, from every cursor the same, where allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.catalog import CATALOG
from support.corpora import advanced, flat
from support.server_process import CommandLine
from support.timelines import revised
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import FileCursor
from tokenloom_server.errors import ConfigError, SourceChanged, TokenizerError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import as_file
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.packing.tokenized_rows import TokenizedRows
from tokenloom_server.sources import lines
from tokenloom_tools.prepare.job import Job
from tokenloom_tools.prepare.preparer import prepare

CODE = """
import pathlib
import pyarrow as pa
import pyarrow.compute as pc

pathlib.Path("imported").touch()

def marked(batch):
    return pa.array([f"<{text.upper()}>" for text in batch["text"].to_pylist()])

def dropping(batch):
    return batch.filter(pc.not_equal(batch["text"], "row 72"))

def null(batch):
    return pc.if_else(pc.equal(batch["text"], "row 72"), None, batch["text"])

def sized(batch):
    return pa.array([text if batch.nbytes < 1_200_000 else "!" for text in batch["text"].to_pylist()])

def counting(batch):
    return pa.array([f"{number} {text}" for number, text in enumerate(batch["text"].to_pylist())])

"""
SOURCE = "jsonl:data/*.jsonl:text"
NAMES = [f"cleaning:{name}" for name in ("marked", "dropping", "null", "sized", "counting")]
#: By file; the last one but one is bad.
ROWS: list[list[Any]] = [
    [f"row {i}" if i % 7 else "" for i in range(100)],
    [*(f"more {i}" for i in range(30)), 5, None],
]
#: What ``marked`` makes of them.
MARKED = [
    f"<{row.upper()}>" if isinstance(row, str) and row else "" for rows in ROWS for row in rows
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows in several blocks of two files, and code in the current folder."""
    monkeypatch.setattr(lines, "STRIDE_BYTES", 512)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cleaning.py").write_text(CODE)
    (tmp_path / "data").mkdir()
    for number, rows in enumerate(ROWS):
        text = "".join(
            json.dumps({"text": row, "even": i % 2 == 0}) + "\n" for i, row in enumerate(rows)
        )
        (tmp_path / f"data/{number}.jsonl").write_text(text)
    return tmp_path


def parsed(transform: str | None = "cleaning:marked", **fields: Any) -> RunConfig:
    document = flat([SOURCE], on_bad_row="skip")
    document["mixture"]["children"][0] |= fields | ({"transform": transform} if transform else {})
    return config.parse(document, where="mixture.yaml", catalog=open_catalog(transforms=NAMES))


@contextmanager
def created(run: RunConfig) -> Iterator[PipelineFactory]:
    factory = builder.create(run, Path(), None)
    yield factory
    factory.resources.close()


def texts(rows: Iterator[TokenizedRows]) -> list[str]:
    """The documents; ids are bytes, and each ends with an end-of-text id."""
    every = [(part.ids, [0, *part.ends.tolist()]) for part in rows]
    pairs = [(ids, begin, end) for ids, ends in every for begin, end in pairwise(ends)]
    return [
        bytes(ids[begin : end - 1].tolist()).decode() if end > begin else ""
        for ids, begin, end in pairs
    ]


def test_every_cursor_gives_the_same_texts(folder: Path) -> None:
    with created(parsed()) as order:
        documents = order.documents(0)
        assert texts(documents.read(None)) == MARKED
        for row in (0, 1, 6, 7, 8, 43, 69, 98, 99):
            assert texts(documents.read(FileCursor(0, 0, row))) == MARKED[row:]
        whole = advanced(order, order.initial(), 90)
        for sample in (1, 17, 50):
            assert advanced(order, advanced(order, order.initial(), sample), 90 - sample) == whole


def test_a_batch_is_about_a_mebibyte(folder: Path) -> None:
    rows = [f"{row:06d}" * 15_000 for row in range(60)]
    for file in (folder / "data").iterdir():
        file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    with created(parsed("cleaning:sized")) as order:
        assert texts(order.documents(0).read(None)) == 2 * rows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dropping",
            r"0\.jsonl: row 72: transform .* ValueError: it gave 0 texts, 0 of them null, for 1; expected",
        ),
        (
            "null",
            r"0\.jsonl: row 72: transform .* it gave 1 texts, 1 of them null, for 1; expected one text for each",
        ),
        (
            "counting",
            r"0\.jsonl: rows 1 to 2: .* two texts for the last row, one among others and one alone",
        ),
    ],
)
def test_what_goes_wrong_names_file_and_row_after_the_rows_before(
    folder: Path, name: str, message: str
) -> None:
    got: list[str] = []
    with created(parsed(f"cleaning:{name}")) as order, pytest.raises(TokenizerError, match=message):
        for rows in order.documents(0).read(None):
            got += texts(iter([rows]))
    if name == "null":
        assert got == ROWS[0][:72]


def test_nothing_is_imported_where_it_is_not_allowed(folder: Path, tokenloom: CommandLine) -> None:
    document = flat([SOURCE], on_bad_row="skip")
    document["mixture"]["children"][0]["transform"] = "cleaning:marked"
    with pytest.raises(
        ConfigError,
        match=r"children\.0\.transform: .*start with --allow-transforms cleaning:marked",
    ):
        config.parse(document, where="mixture.yaml", catalog=CATALOG)
    without = config.parse(flat([SOURCE], on_bad_row="skip"), where="mixture.yaml", catalog=CATALOG)
    timeline = Timeline(builder.create(without, Path(), None))
    (folder / "data/other.txt").write_text("a line\n" * 20)
    added = {"source": "txt:data/other.txt:text", "transform": "cleaning:marked"}
    for change in ({"add": [{"child": added}]}, {"mixture": document["mixture"]}):
        with pytest.raises(ConfigError, match="--allow-transforms cleaning:marked"):
            revised(timeline, 4, **change)
    (folder / "mixture.yaml").write_text(yaml.safe_dump(document))
    assert not (folder / "imported").exists()
    allowed = tokenloom(
        "validate",
        "mixture.yaml",
        "--allow-transforms",
        "cleaning:null,cleaning:marked",
        folder=folder,
    )
    assert allowed.status == 0, allowed.output
    assert (folder / "imported").exists()


def test_other_code_is_refused_with_both_values(folder: Path) -> None:
    with created(parsed()) as order:
        record = order.record.to_json()
    code = json.loads(record)["manifest"]["transforms"]["cleaning:marked"]
    assert code["name"] == "cleaning:marked"
    (folder / "cleaning.py").write_text(CODE + "# changed")
    with pytest.raises(
        SourceChanged, match=rf"its code is .*'sha256:.*began with .*{code['digest']}"
    ):
        builder.load(parsed(), Path(), None, record)


def test_a_revision_records_the_code_of_what_it_adds(folder: Path) -> None:
    (folder / "data/other.txt").write_text("a line\n" * 20)
    added = {"source": "txt:data/other.txt:text", "transform": "cleaning:marked"}
    with created(parsed(None)) as order:
        timeline = revised(Timeline(order), 4, add=[{"child": added}])
        content = json.loads(timeline.revisions[0].content)
        assert content["transforms"]["cleaning:marked"]["digest"].startswith("sha256:")
        with pytest.raises(
            ConfigError, match="transform is not given in this run and cleaning:null in the new"
        ):
            revised(timeline, 8, mixture=as_file(parsed("cleaning:null")))


def test_what_is_prepared_has_the_same_texts(folder: Path) -> None:
    run = parsed(on_bad_row="skip", filter="even == true")
    options: dict[str, Any] = {
        "form": "arrow",
        "shard_bytes": 2000,
        "ids_too": False,
        "shuffled": False,
        "threads": 1,
    }
    job = Job(run, folder, folder / "index", DataRoots(), **options)
    assert job.document()["transforms"] == job.order.record.manifest.transforms
    done = prepare(job, folder / "out", on_done=lambda *_: None, on_kept=lambda *_: None)
    job.order.resources.close()
    served = builder.create(config.load(done.mixture, CATALOG), done.mixture.parent, None)
    made = texts(served.documents(0).read(None))
    assert made == [text if i % 2 == 0 else "" for i, text in enumerate(MARKED)]

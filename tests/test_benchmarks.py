"""The benchmarks do not rot: their modules import, their data are what they say, their results can be read again.

Nothing here is timed.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.catalog import CATALOG
from tokenloom_server.config import mixture_file as config
from tokenloom_server.order import builder

from benchmarks import corpora, document, pictures, prototype, shuffle, tokeniser
from benchmarks.corpora import Corpus, Documents, IdCorpus, OwnedCorpus, TextCorpus
from benchmarks.results import FOLDER, Result, Row, newest
from benchmarks.workloads import Form, OwnedForm, Workload

ROOT = Path(__file__).resolve().parent.parent
SMALL = IdCorpus(
    name="small",
    sources=(
        Documents(count=300, files=3),
        Documents(count=40, mean=800, sigma=1.2),
        Documents(count=5, mean=3_000),
    ),
    vocabulary=1_000,
)


def test_every_benchmark_imports() -> None:
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert importlib.import_module(f"benchmarks.{path.stem}").__doc__


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpora.folder_of, "__defaults__", (tmp_path,))
    return tmp_path


def test_a_corpus_of_text_has_each_text_once_and_a_tokeniser(cache: Path) -> None:
    root = cache / "own"
    root.mkdir()
    for number in range(60):
        ending = (".py", ".md", ".js")[number % 3]
        (root / f"{number}{ending}").write_text(f"number {number} of many lines\n" * 20)
    (root / "copy.py").write_text((root / "0.py").read_text())
    (root / "binary.py").write_bytes(bytes(range(256)))
    corpus = TextCorpus(
        name="small-text", megabytes=1, roots=(root,), files=(2, 1, 1), learn_every=2
    )
    folder = corpora.folder_of(corpus)
    texts = [
        text
        for file in sorted(folder.glob("parquet/*/*.parquet"))
        for text in pq.read_table(file)["text"].to_pylist()
    ]
    assert texts
    assert len(texts) == len(set(texts))
    sizes = [
        sum(
            len(t)
            for f in folder.glob(f"parquet/{s}/*")
            for t in pq.read_table(f)["text"].to_pylist()
        )
        for s in "02"
    ]
    assert sizes[0] > sizes[1], "the sources are cut to their weights"
    calls = list(tokeniser.calls(folder))
    assert sorted(text for call in calls for text in call) == sorted(
        text.encode() for text in texts
    )
    marks = tokeniser.encode(folder)
    assert len(marks) == len(calls)
    assert tokeniser.tokens_per_cpu_s(marks, 0, math.inf) == pytest.approx(
        marks[-1][0] / marks[-1][1]
    )
    found = builder.create(config.load(_written(corpus, cache), CATALOG), cache, None)
    assert found.record.vocab_size > 256


def _written(corpus: Corpus, folder: Path, form: Form | OwnedForm = "parquet") -> Path:
    return Workload(name="small", about="", corpus=corpus, form=form).write(folder)


@pytest.mark.parametrize("form", get_args(Form) + get_args(OwnedForm))
def test_a_workload_is_a_mixture_that_the_server_takes(form: Form | OwnedForm, cache: Path) -> None:
    corpus = OwnedCorpus(name="owned", ids=SMALL) if form in get_args(OwnedForm) else SMALL
    order = builder.create(config.load(_written(corpus, cache, form), CATALOG), cache, None)
    pipeline = order.pipeline(order.initial())
    pipeline.advance(64)
    assert pipeline.ended is None
    assert pipeline.state().sample_index == 64
    assert order.record.dtype == np.uint16
    # Documents that carry their end have the tokens of those that get one.
    as_arrow = builder.create(config.load(_written(SMALL, cache, "arrow"), CATALOG), cache, None)
    pipeline, again = order.pipeline(order.initial()), as_arrow.pipeline(as_arrow.initial())
    for one in (pipeline, again):
        one.advance(64)
    assert pipeline.state().digest == again.state().digest


def test_the_prototype_packs_all_documents_of_a_source_in_order(cache: Path) -> None:
    folder = corpora.folder_of(SMALL)
    for form in ("parquet", "arrow"):
        columns = prototype.columns(folder, form, 0)  # type: ignore[arg-type]
        samples = prototype.samples(columns)
        got = np.concatenate([next(samples) for _ in range(20)])
        files = sorted((folder / "parquet" / "0").iterdir())
        documents = [
            document for file in files for document in pq.read_table(file)["ids"].to_pylist()
        ]
        wanted = [value for document in documents for value in (*document, corpora.END_OF_TEXT)]
        assert got.tolist() == wanted[: len(got)]


def test_a_result_can_be_read_again(tmp_path: Path) -> None:
    result = Result.begin("some", "a title")
    result.rows.append(
        Row(name="one", runs=[{"ns": 1.0}, {"ns": 5.0}, {"ns": 2.0}], at={"ranks": 2})
    )
    result.save(tmp_path / f"{result.date[:10]}-some.json")
    again = newest("some", tmp_path)
    assert again.row("one").median == {"ns": 2.0}
    assert again.row("one").spread("ns") == 2.0
    assert again.machine["cores"] == os.cpu_count()
    assert again.commit
    with pytest.raises(KeyError, match="no row 'two'"):
        again.row("two")
    with pytest.raises(FileNotFoundError, match="no result of 'other'"):
        newest("other", tmp_path)


def test_a_result_does_not_say_where_the_repository_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", "--json", str(FOLDER / "a.json"), f"--json={FOLDER}/b.json", "/elsewhere/c"],
    )
    command = Result.begin("some", "a title").command
    assert command.endswith(
        " --json benchmarks/results/a.json --json=benchmarks/results/b.json /elsewhere/c"
    )


# --- the comparison with other loaders ---------------------------------------------------------------------------


# --- the documents -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results that are committed; not those that somebody has just made."""
    listed = subprocess.run(
        ["git", "ls-files", str(FOLDER)], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("which results are kept is for git to say")
    folder = tmp_path_factory.mktemp("results")
    for name in listed.stdout.splitlines():
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize("path", document.DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_say_what_was_measured(path: Path, kept_results: Path) -> None:
    """No figure of theirs is copied by hand: run `python -m benchmarks.document` where this fails."""
    text = path.read_text(encoding="utf-8")
    assert document.blocks_in([text])
    assert document.rendered(text, kept_results)[0] == text


def test_every_table_stands_in_a_document_and_every_picture_is_shown() -> None:
    texts = [path.read_text(encoding="utf-8") for path in document.DOCUMENTS]
    assert document.blocks_in(texts) == set(document.BLOCKS)
    shown = set(re.findall(r"!\[[^]]+\]\(img/([a-z]+)\.svg\)", "".join(texts)))
    assert shown == set(pictures.PICTURES)


def test_a_table_has_medians_and_says_where_they_are_from(tmp_path: Path) -> None:
    result = Result.begin("variants", "a title")
    result.rows.append(
        Row(name="weighted, 3 sources, flat", runs=[{"M tokens/s": 300.0}, {"M tokens/s": 100.0}])
    )
    result.save(tmp_path / f"{result.date[:10]}-variants.json")
    text, kept = document.rendered(
        "a\n<!-- figures: variants -->\nold\n<!-- end -->\nb\n", tmp_path
    )
    assert not kept
    assert "| weighted, 3 sources, flat | 200 |" in text
    assert "old" not in text
    assert f"Medians of 2 runs; `{result.command}`" in text
    assert document.rendered(text, tmp_path)[0] == text
    again, kept = document.rendered("<!-- figures: realistic -->\nold\n<!-- end -->\n", tmp_path)
    assert "old" in again, "what was not measured stays"
    assert len(kept) == 1


def test_rows_that_were_prepared_are_shuffled_nearly_as_if_they_were_drawn_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = next(way for way in shuffle.WAYS if way.name == "short, rows, prepared")
    monkeypatch.setattr(shuffle, "WAYS", (prepared,))
    found, _ = shuffle.run(100_000)
    ours, at_random = (row.median["hundredths in 100 samples"] for row in found)
    assert at_random == pytest.approx(63.4, abs=0.3)
    assert ours >= 60


def test_what_is_measured_of_shuffles_is_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuffle, "WAYS", shuffle.WAYS[:3])
    found, drawn = shuffle.run(4_000)
    none, shards, rows, at_random = (row.median for row in found)
    assert none["rank correlation"] == pytest.approx(1)
    assert none["spread of neighbours"] < 0.01
    # A document of two hundred samples is as long a run, whatever comes before it.
    assert none["longest run of one document"] in (200, 201)
    assert abs(shards["rank correlation"]) < 1
    assert rows["spread of neighbours"] > 0.5 > 10 * shards["spread of neighbours"]
    assert at_random["spread of neighbours"] == pytest.approx(1, abs=0.05)
    assert drawn.keys() == {"none", "shards", "rows"}
    pictures.places(tmp_path / "shuffle.svg", drawn, 100)
    assert (tmp_path / "shuffle.svg").stat().st_size < 200_000

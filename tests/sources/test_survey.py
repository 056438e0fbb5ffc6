"""What lies in folders is found as sources that read each file of it once, and nothing else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest
from support.catalog import SOURCES
from support.corpora import write_megatron, write_npy, write_parquet
from support.litdata_files import write_litdata
from support.mosaic import write_mds
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources.scheme import scheme_of
from tokenloom_tools.survey import MAX_SERIES, Survey

ROWS = [[1, 2, 3], [4, 5]] * 4


def lines(path: Path, rows: int = 4, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"text": f"row {row}", **columns}) + "\n" for row in range(rows))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def looked_at(base: Path, *places: str) -> Survey:
    survey = Survey(base, SOURCES, lambda paths, _: paths[0], lambda columns: "messages" in columns)
    for place in places or ("data",):
        survey.look_at(place)
    read = [
        path for each in survey.candidates for path in scheme_of(each.spec).paths(each.spec, base)
    ]
    assert len(read) == len(set(read)), "no file is in two sources"
    assert sum(each.files for each in survey.candidates) == len(read)
    return survey


def specs(survey: Survey) -> list[str]:
    return [f"{each.spec.scheme.name}:{each.spec.location}" for each in survey.candidates]


def test_folders_and_series_of_files_are_sources_by_format(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in (
        "wiki/2020/a",
        "wiki/2021/b",
        "code/x",
        "web-00001-of-00002",
        "web-00002-of-00002",
        "c4_0",
        "c4_1",
    ):
        lines(data / f"{name}.jsonl")
    lines(data / "code" / "y.jsonl.gz")
    for shard in range(2):
        write_parquet(data / "code" / f"ids-{shard}.parquet", ROWS)
    (data / "news.txt").write_text("a line\n" * 9)
    assert sorted(specs(looked_at(tmp_path))) == [
        "jsonl:data/c4_*.jsonl",
        "jsonl:data/code/x.jsonl",
        "jsonl:data/code/y.jsonl.gz",
        "jsonl:data/web-*.jsonl",
        "jsonl:data/wiki/**/*.jsonl",
        "parquet:data/code/*.parquet",
        "txt:data/news.txt",
    ]


def test_the_first_folder_that_holds_more_than_one_thing_has_the_sources(tmp_path: Path) -> None:
    for name in ("corpus/v1/text/wiki/a", "corpus/v1/text/code/b", "corpus/v1/text/code/c"):
        lines(tmp_path / f"{name}.jsonl")
    assert specs(looked_at(tmp_path, "corpus")) == [
        "jsonl:corpus/v1/text/code/*.jsonl",
        "jsonl:corpus/v1/text/wiki/a.jsonl",
    ]
    assert specs(looked_at(tmp_path / "corpus" / "v1" / "text", ".")) == [
        "jsonl:code/*.jsonl",
        "jsonl:wiki/a.jsonl",
    ]
    assert specs(looked_at(tmp_path, "corpus/v1/text/wiki", "corpus/v1/text/code/c.jsonl")) == [
        "jsonl:corpus/v1/text/wiki/a.jsonl",
        "jsonl:corpus/v1/text/code/c.jsonl",
    ]
    assert specs(looked_at(Path("/"), str(tmp_path / "corpus/v1/text/code"))) == [
        f"jsonl:{tmp_path}/corpus/v1/text/code/{name}.jsonl" for name in "bc"
    ]


def test_splits_to_evaluate_on_are_left_out_unless_there_is_nothing_else(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001", "validation-00000-of-00001", "test-00000-of-00001"):
        write_parquet(tmp_path / f"{name}.parquet", ROWS)
    lines(tmp_path / "wiki" / "train" / "a.jsonl")
    lines(tmp_path / "wiki" / "dev" / "a.jsonl")
    survey = looked_at(tmp_path, ".")
    assert specs(survey) == ["jsonl:wiki/train/a.jsonl", "parquet:train-00000-of-00001.parquet"]
    assert sorted(survey.left_out) == [
        "test-00000-of-00001.parquet",
        "validation-00000-of-00001.parquet",
        "wiki/dev/a.jsonl",
    ]
    assert specs(looked_at(tmp_path, "wiki/dev")) == ["jsonl:wiki/dev/a.jsonl"]


def test_what_is_hidden_empty_or_foreign_is_named_and_not_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("a-1", ".hidden", "a-2"):
        lines(data / f"{name}.jsonl")
    lines(data / ".cache" / "a.jsonl")
    lines(data / "README.txt")
    for name, text in (
        ("a-0.jsonl", ""),
        ("settings.json", "{\n}"),
        ("notes.md", "x"),
        ("tokenizer.json", "{}"),
    ):
        (data / name).write_text(text)
    survey = looked_at(tmp_path)
    assert specs(survey) == ["jsonl:data/a-*.jsonl"]
    assert survey.candidates[0].columns.keys() == {"text"}
    reasons = {path.removeprefix("data/"): reason for path, reason in survey.left_out.items()}
    assert "cannot be read as jsonl" in reasons.pop("settings.json")
    assert reasons == {
        **dict.fromkeys((".hidden.jsonl", ".cache"), "hidden"),
        **dict.fromkeys(("README.txt", "tokenizer.json"), "not data, by its name"),
        "notes.md": "not a format that is read",
        "a-0.jsonl": "empty",
    }


def test_links_that_lead_nowhere_and_gaps_of_a_series_are_told(tmp_path: Path) -> None:
    lines(tmp_path / "data" / "web-00001-of-00003.jsonl")
    assert looked_at(tmp_path).warnings == [
        "source 'data/web-00001-of-00003.jsonl': 2 of the 3 files 'data/web-…-of-00003.jsonl' are not there; the "
        "others are read"
    ]
    for name, said in (
        ("web-00002-of-00003", "is a link to 'nowhere'"),
        ("other", "is a link to 'nowhere'"),
    ):
        (tmp_path / "data" / f"{name}.jsonl").symlink_to("nowhere")
        with pytest.raises(SourceError, match=f"{name}.jsonl' {said}"):
            looked_at(tmp_path)
        (tmp_path / "data" / f"{name}.jsonl").unlink()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 1234567\n"
    (tmp_path / "data" / "b.jsonl").write_text(pointer)
    with pytest.raises(SourceError, match=r"b.jsonl' is no data, but a pointer"):
        looked_at(tmp_path)


def test_folders_and_pairs_of_files_are_whole_sources(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "score": [1.0, 2.0]})
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "data" / "saved")
    (tmp_path / "data" / "old").mkdir()
    write_megatron(tmp_path / "data" / "old" / "code_document", ROWS)
    write_megatron(tmp_path / "data" / "old" / "wiki_document", ROWS)
    (tmp_path / "data" / "lone.bin").write_bytes(b"12")
    write_npy(tmp_path / "data" / "ids.npy", ROWS)
    write_mds(tmp_path / "data" / "mosaic", {"text": "str"}, [{"text": "a"}, {"text": "b"}])
    write_litdata(tmp_path / "data" / "lit", [{"text": "a"}, {"text": "b"}])
    survey = looked_at(tmp_path)
    assert sorted(specs(survey)) == [
        "arrow:data/saved/train",
        "litdata:data/lit",
        "mds:data/mosaic",
        "megatron:data/old/*",
        "npy:data/ids.npy",
    ]
    columns = {each.spec.scheme.name: each.columns.keys() for each in survey.candidates}
    assert columns["mds"] == columns["litdata"] == {"text"}
    assert survey.left_out.keys() == {
        "data/saved/test",
        "data/lone.bin",
        "data/saved/dataset_dict.json",
    }
    (tmp_path / "data" / "old" / "lone.bin").write_bytes(b"12")
    with pytest.raises(SourceError, match=r"'data/old/lone\.idx' is missing beside"):
        looked_at(tmp_path)


def test_many_files_without_a_series_are_one_source(tmp_path: Path) -> None:
    for i in range(MAX_SERIES + 1):
        lines(tmp_path / "data" / f"{chr(97 + i)}.jsonl", rows=1)
    assert specs(looked_at(tmp_path)) == ["jsonl:data/*.jsonl"]


def test_files_that_no_pattern_tells_from_others_are_refused_with_these(tmp_path: Path) -> None:
    for name in ("a/x", "a/y", "a/test", "b/x"):
        lines(tmp_path / "data" / f"{name}.jsonl")
    with pytest.raises(
        ConfigError, match=r"'data/a/x\.jsonl' and 1 more files .* others: data/a/test\.jsonl"
    ):
        looked_at(tmp_path)

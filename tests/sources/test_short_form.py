"""The short form of a flat mixture: what is found without being said, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.catalog import CATALOG, SOURCES
from support.corpora import order_of
from support.features import LATENTS, MORE, write_features
from support.features import document as bucketed
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.order_fields import order_digest
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import ConfigError
from tokenloom_tools import short_form
from tokenloom_tools.cli.app import app
from typer.testing import CliRunner, Result

RUN: dict[str, Any] = {"run": "mix", "seed": 3, "tokenizer": "bytes", "sequence_length": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every scheme, some in folders, one with a space in its name."""
    root = tmp_path_factory.mktemp("mix")
    texts = pa.table({"id": list(range(9)), "text": ["some text of a row"] * 9})
    ids = pa.table({"tokens": [[1, 2, 3, 4]] * 9, "length": [4] * 9})
    for name, table in (
        ("wiki/part-0", texts),
        ("wiki/part-1", texts),
        ("deep/a/b/x", ids),
        ("both", None),
    ):
        path = root / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table({"text": ["a"], "input_ids": [[1]]}) if table is None else table, path
        )
    (root / "my notes").mkdir()
    (root / "my notes" / "a.txt").write_text("a line\n" * 9)
    for name in ("code.jsonl", "odd:name.jsonl", "a@b.jsonl"):
        (root / name).write_text(
            "".join(json.dumps({"path": "x", "text": f"line {i}"}) + "\n" for i in range(9))
        )
    (root / "bodies.jsonl").write_text(json.dumps({"title": "a", "body": "b"}) + "\n")
    (root / "mixed").mkdir()
    (root / "mixed" / "a.txt").write_text("a\n")
    (root / "mixed" / "a.parquet").write_bytes((root / "both.parquet").read_bytes())
    (root / "empty").mkdir()
    np.save(root / "flat.npy", np.arange(9, dtype=np.uint16))
    for name in ("raw.bin", "owned.v1.bin", "owned.v1.idx"):
        (root / name).write_bytes(bytes(8))  # found by their names alone
    (root / "README.md").write_text("nothing to train on")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 9, "labels": [[1, 2, 3]] * 9})
    saved.save_to_disk(root / "saved")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(root / "splits")
    return root


def children(mix: str, folder: Path) -> list[dict[str, Any]]:
    """The sources of a short form, which is valid."""
    document = short_form.document(mix, folder, SOURCES, **RUN)
    config.parse(document, where=short_form.OPTION, catalog=CATALOG)
    found: list[dict[str, Any]] = document["mixture"]["children"]
    return found


@pytest.mark.parametrize(
    ("item", "source"),
    [
        ("wiki", "parquet:wiki/*.parquet:text"),
        ("wiki/", "parquet:wiki/*.parquet:text"),
        ("wiki/*.parquet", "parquet:wiki/*.parquet:text"),
        ("wiki/part-0.parquet", "parquet:wiki/part-0.parquet:text"),
        ("deep", "parquet:deep/**/*.parquet:tokens"),
        ("my notes", "txt:my notes/*.txt:text"),
        ("code.jsonl", "jsonl:code.jsonl:text"),
        ("code.jsonl@path", "jsonl:code.jsonl:path"),
        ("odd:name.jsonl", "jsonl:odd:name.jsonl:text"),
        ("a@b.jsonl", "jsonl:a@b.jsonl:text"),
        ("a@b.jsonl@path", "jsonl:a@b.jsonl:path"),
        ("saved", "arrow:saved:input_ids"),
        ("saved@labels", "arrow:saved:labels"),
        ("splits/test", "arrow:splits/test:input_ids"),
        ("both.parquet@text", "parquet:both.parquet:text"),
        ("parquet:both.parquet:text", "parquet:both.parquet:text"),
        ("arrow:saved:labels", "arrow:saved:labels"),
        ("flat.npy", "npy:flat.npy"),
        ("npy:flat.npy", "npy:flat.npy"),
        ("npy:raw.bin:uint16", "npy:raw.bin:uint16"),
        ("megatron:owned.v1", "megatron:owned.v1"),
    ],
)
def test_scheme_and_column_of_an_item_are_found(item: str, source: str, folder: Path) -> None:
    for suffix, weight in (("", None), (":0.25", 0.25), (":3", 3), (":1e-3", 0.001)):
        (child,) = children(shlex.quote(item + suffix), folder)
        assert child["source"] == source
        assert child.get("weight") == weight


def test_a_whole_mixture_is_written_out_and_reads_back_the_same(
    folder: Path, tmp_path: Path
) -> None:
    document = short_form.document(
        "wiki:0.9 'my notes:0.1' code.jsonl", folder, SOURCES, **RUN, policy="weighted"
    )
    assert document == {
        **RUN,
        "mixture": {
            "policy": "weighted",
            "children": [
                {"source": "parquet:wiki/*.parquet:text", "alias": "wiki", "weight": 0.9},
                {"source": "txt:my notes/*.txt:text", "alias": "my notes", "weight": 0.1},
                {"source": "jsonl:code.jsonl:text", "alias": "code"},
            ],
        },
    }
    path = tmp_path / "mixture.yaml"
    path.write_text(short_form.as_yaml(document), encoding="utf-8")
    assert config.load(path, CATALOG) == config.parse(
        document, where=short_form.OPTION, catalog=CATALOG
    )


def test_aliases_take_as_much_of_the_path_as_tells_them_apart(folder: Path) -> None:
    mix = "parquet:wiki/part-0.parquet:text wiki/part-[1-9]*.parquet mixed/a.txt 'my notes/a.txt' both.parquet@text"
    found = [child["alias"] for child in children(mix, folder)]
    assert found == ["part-0", "part", "mixed/a", "my notes/a", "both"]


@pytest.mark.parametrize(
    ("mix", "fault"),
    [
        ("", "is empty"),
        ("'wiki", "No closing quotation"),
        ("wiki:x", r"'wiki:x': the weight is 'x', expected a number above 0, as in wiki:0.9"),
        ("wiki:", r"the weight is '', expected"),
        ("wiki@text:1,5", r"the weight is '1,5', expected"),
        ("wiki:0", "the weight is '0', expected a number above 0"),
        ("wiki:-1", "the weight is '-1', expected"),
        ("wiki:nan", "the weight is 'nan', expected"),
        ("wiki:inf", "the weight is 'inf', expected"),
        (
            "nothing:0.5",
            r"'nothing' names no file and no folder below '.*'; an item is path\[@column\]\[:weight\]",
        ),
        ("nothing/*.txt", "names no file and no folder"),
        (
            "wiki code.jsonl wiki",
            r"'wiki' and 'wiki' both read 'wiki/part-0.parquet'; name each file once",
        ),
        ("wiki wiki/part-1.*:2", r"'wiki' and 'wiki/part-1.\*:2' both read 'wiki/part-1.parquet'"),
        (
            "both.parquet:0.5",
            r"has text and input_ids; .* both.parquet@COLUMN:0.5, or parquet:both.parquet:COLUMN:0.5",
        ),
        (
            "bodies.jsonl",
            r"none of text, input_ids, ids, tokens; .* \(text or ids\): title \(text\), body \(text\)",
        ),
        ("mixed", r"several kinds \(.parquet, .txt\); name one: mixed/\*.parquet, mixed/\*.txt"),
        ("mixed/*", r"matches files of several kinds \(.parquet, .txt\)"),
        ("empty", "holds no file that ends with .parquet, .jsonl"),
        (
            "README.md",
            "how 'README.md' is to be read does not show; expected a name that ends with .parquet",
        ),
        ("splits", "a dataset for each split; name one of them: splits/test, splits/train"),
        ("saved/data-*.arrow@labels", "end with .arrow are read by folder"),
        ("deep/*", "matches folders only"),
        ("x" * 5000, "cannot be looked at"),
        ("memory://nowhere/x.parquet:1", "names no file and no folder"),
        ("parquet:both.parquet", "expected parquet:GLOB:COLUMN, with no part empty"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(mix: str, fault: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=fault):
        children(mix, folder)


def test_nothing_outside_the_data_roots_is_looked_at(folder: Path, tmp_path: Path) -> None:
    roots = DataRoots.of([folder / "wiki"])
    assert short_form.document("wiki", folder, SOURCES, roots, **RUN)
    link = folder / "wiki" / "linked.txt"
    link.symlink_to(folder / "my notes" / "a.txt")
    try:
        for mix in (
            "code.jsonl",
            "nothing-here",
            "saved",
            "txt:code.jsonl:text",
            "wiki/linked.txt",
            f"{tmp_path}/*",
        ):
            with pytest.raises(ConfigError, match="lies below no data root"):
                short_form.document(mix, folder, SOURCES, roots, **RUN)
    finally:
        link.unlink()


# --- the command -------------------------------------------------------------------------------------------------

OPTIONS = ("--run", "mix", "--sequence-length", "8", "--tokenizer", "bytes")


def validated(*arguments: object, status: int = 0) -> Result:
    done = CliRunner().invoke(app, ["validate", *map(str, arguments)], env={"COLUMNS": "400"})
    assert done.exit_code == status, done.output
    return done


def printed(*arguments: str) -> RunConfig:
    """What ``validate --print`` makes of a short form in the current folder, read as a file."""
    done = validated(*arguments, "--print")
    assert "valid" in done.stderr
    return config.parse(yaml.safe_load(done.stdout), where="printed", catalog=CATALOG)


def test_validate_prints_a_file_to_go_on_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    found = printed("--dataset-mix", "wiki:0.9 code.jsonl:0.1", *OPTIONS)
    assert [source.weight for source in found.sources] == [0.9, 0.1]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ((), "expected a mixture file or --dataset-mix, one of the two"),
        (
            ("a.yaml", "--dataset-mix", "wiki", *OPTIONS),
            "expected a mixture file or --dataset-mix, one of the two",
        ),
        (("a.yaml", "--seed", "3"), "--seed: belongs to --dataset-mix"),
        (("--dataset-mix", "wiki"), "--dataset-mix needs --run and --sequence-length beside it"),
        (
            ("--dataset-mix", "wiki", *OPTIONS, "--policy", "best"),
            "--dataset-mix: mixture.policy: Input should be",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: tuple[str, ...], fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert fault in validated(*arguments, status=2).output


def test_a_server_serves_the_short_form_from_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    mix = "wiki:0.9 code.jsonl:0.1"
    server = ServerProcess(tmp_path / "short", flags=("--dataset-mix", mix, *OPTIONS)).start()
    try:
        with World(server.url("mix")) as world:
            digest, index = world.steps(12).digest, world.sample_index
        assert "the mixture of --dataset-mix, as a file:\nrun: mix\n" in server.log
        assert "  - source: jsonl:code.jsonl:text\n    alias: code\n    weight: 0.1\n" in server.log
    finally:
        server.kill()
    order = order_of(folder, short_form.document(mix, folder, SOURCES, **RUN | {"seed": 0}))
    pipeline = order.pipeline(order.initial())
    pipeline.advance(index)
    assert digest_hex(pipeline.state().digest) == digest


# --- Batches of ready tensors --------------------------------------------------------------------------------------


@pytest.fixture
def features(tmp_path: Path) -> Path:
    write_features(tmp_path)
    lengths = [[1] * (1 + i % 7) for i in range(40)]
    pq.write_table(pa.table({"ids": lengths}), tmp_path / "lengths.parquet", row_group_size=10)
    return tmp_path


BUCKETED = ("--run", "latents", "--seed", "5", "--global-batch-size", "4", "--bucket-by", "aspect")


@pytest.mark.parametrize("option", ["--dataset-mix", "--dataset_mix"])
def test_a_bucketed_mix_is_the_run_that_its_file_is(
    option: str, features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(features)
    children = [{"source": LATENTS, "weight": 2}, {"source": MORE}]
    document = bucketed(mixture={"policy": "least_consumed", "children": children})
    found = printed(option, "latents:2 more", *BUCKETED)
    assert order_digest(found) == order_digest(
        config.parse(document, where="long", catalog=CATALOG)
    )


def test_edges_are_given_at_once_or_one_by_one(
    features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(features)
    mix = ("--dataset-mix", "lengths.parquet", "--run", "a", "--global-batch-size", 4)
    by_length = ("--bucket-by", "length(ids)")
    for edges in (("--edges", "3,7"), ("--edges", 3, "--edges", 7)):
        done = validated(*mix, *by_length, *edges, "--print")
        for part in (
            "global_batch_size: 4\n",
            "batching:\n  bucket_by: length(ids)\n  edges:\n  - 3\n  - 7\n",
            "- source: parquet:lengths.parquet:*\n",
        ):
            assert part in done.output
    for arguments, fault in (
        ((*mix, *by_length, "--edges", "3,wide"), "batching.edges.1"),
        ((*mix[:4], *by_length), "--dataset-mix needs --global-batch-size beside it"),
        (("mixture.yaml", *by_length), "--bucket-by: belongs to --dataset-mix"),
        ((*mix, "--sequence-length", 8), "global_batch_size: is for batching"),
        ((*mix, "--sequence-length", 8, "--edges", 3), "batching.bucket_by"),
    ):
        assert fault in validated(*arguments, status=2).output

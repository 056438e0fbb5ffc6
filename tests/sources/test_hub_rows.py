"""Rows of datasets on the Hub are those that ``load_dataset(…, streaming=True)`` of `datasets` gives."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.catalog import hub_resolver, spec_of
from support.hub import CONVERSION, StandInHub, card, files
from tokenloom_server.config.catalog import Spec
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.open import open_source


def rows(salt: str) -> list[str]:
    return [f"{salt} {i}: zwölf 🥊" + " x" * (i % 5) for i in range(9)]


def parquet(salt: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": rows(salt), "n": range(9)}), file, row_group_size=4)
    return file.getvalue()


def arrow(salt: str, *, stream: bool) -> bytes:
    table, file = pa.table({"text": rows(salt)}), io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return file.getvalue()


def jsonl(salt: str) -> bytes:
    return "".join(
        json.dumps({"n": i, "text": row}) + "\n" for i, row in enumerate(rows(salt))
    ).encode()


CONFIGS: list[dict[str, Any]] = [
    {
        "config_name": "2024",
        "data_files": [
            {"split": "train", "path": ["en/two.parquet", "en/[ot][nh]*.parquet"]},
            {"split": "held.out", "path": "de/t*/**"},
        ],
    },
    {"config_name": "de", "data_dir": "de", "default": True},
    {"config_name": "all", "data_files": "*/*.parquet"},
]

#: Repositories at their revisions, and of each the configs and splits that are compared.
REPOS: dict[str, tuple[dict[str, dict[str, bytes]], list[tuple[str | None, str | None, str]]]] = {
    "card": (
        {
            "main": {
                "README.md": card(*CONFIGS),
                **{f"en/{name}.parquet": parquet(name) for name in ("one", "three", "two")},
                **{f"de/{split}/0.parquet": parquet(split) for split in ("train", "test")},
            }
        },
        [("2024", None, "train"), ("2024", None, "held.out"), (None, None, "train"), ("de", None, "test"),
         ("all", None, "train")],
    ),
    "yaml": (
        {"main": {".huggingface.yaml": b"configs: [{config_name: b, data_files: b.parquet}]", "a.parquet": parquet("a"),
                  "b.parquet": parquet("b")}},
        [("b", None, "train")],
    ),
    "revisions": (
        {
            "refs/pr/1": {"data/train-00000-of-00001.parquet": parquet("pr")},
            "refs/tags/v1": {"train.parquet": parquet("tag")},
            CONVERSION: {"default/train/0000.parquet": parquet("c0"), "default/train/0001.parquet": parquet("c1")},
            "main": {f"data/{split}-0000{i}-of-00002.parquet": parquet(f"{split} {i}")
                     for split in ("train", "odd_one") for i in range(2)},
        },
        [(None, None, "train"), (None, None, "odd_one"), (None, "v1", "train"), (None, "refs/pr/1", "train"),
         (None, CONVERSION, "train")],
    ),
    "lines": (
        {
            "main": {
                "train.jsonl": jsonl("plain"),
                "train-1.json": jsonl("json"),
                "train-2.jsonl.gz": gzip.compress(jsonl("gz")),
                "train-3.jsonl.bz2": bz2.compress(jsonl("bz2")),
                "train-4.jsonl.xz": lzma.compress(jsonl("xz")),
                "dev.ndjson": jsonl("dev"),
            }
        },
        [(None, None, "train"), (None, None, "validation")],
    ),
    "text": (
        {"main": {"train/a.txt": "one\n\n zwölf\nlast".encode(), "train/b.txt.gz": gzip.compress(b"packed\r\ntwo\n")}},
        [(None, None, "train")],
    ),
    "arrow": (
        {"main": {"train-0.arrow": arrow("stream", stream=True), "train-1.arrow": arrow("file", stream=False)}},
        [(None, None, "train")],
    ),
}  # fmt: skip

#: Repositories as they are met, of files without rows, and the splits that are asked of each.
LAYOUTS: dict[str, tuple[dict[str, bytes], tuple[tuple[str | None, str], ...]]] = {
    "sharded": (
        files(
            *(f"data/train-{i:05}-of-00003-0a1b.parquet" for i in range(3)),
            "data/test-00000-of-00001.parquet",
            "data/my_split-00000-of-00001.parquet",
            "README.md",
            ".gitattributes",
            "data/notes.txt",
        ),
        ((None, "train"), (None, "test"), (None, "my_split")),
    ),
    "folders": (
        files("train/b.parquet", "train/a.parquet", "validation/c.parquet", "train/deep/d.parquet", "extra.parquet"),
        ((None, "train"), (None, "validation")),
    ),
    "folder-words": (files("x-train/b.parquet", "y/dev_1/a.parquet", "z/evaluation/a.parquet"),
                     ((None, "train"), (None, "validation"), (None, "test"))),
    "names": (
        files("my-train.parquet", "train_2.parquet", "sub/valid.1.parquet", "training.parquet", "contrain.parquet"),
        ((None, "train"), (None, "validation")),
    ),
    "all": (files("b.parquet", "sub/a.parquet", "c.parquet", ".hidden/x.parquet", "__special__/y.parquet", "n.json"),
            ((None, "train"),)),
    "card": (
        files("en/one.parquet", "en/two.parquet", "de/one.parquet", "de/test/x.parquet", "fr/a.parquet", "fr/b.parquet")
        | {
            "README.md": card(
                {"config_name": "en", "data_files": "en/*", "default": True},
                {"config_name": "de", "data_files": [
                    {"split": "train", "path": ["de/one.parquet", "en/t*.parquet"]},
                    {"split": "test", "path": "de/test/**"},
                ]},
                {"config_name": "fr.1", "data_files": ["fr/b.parquet", "fr/a.parquet"]},
                {"config_name": "folder", "data_dir": "de"},
                {"config_name": "both", "data_dir": "de", "data_files": "*.parquet"},
            )
        },
        ((None, "train"), ("en", "train"), ("de", "train"), ("de", "test"), ("fr.1", "train"), ("folder", "test"),
         ("both", "train")),
    ),
    "twice": (files("train/train-0/a.parquet", "train/b.parquet"), ((None, "train"),)),

}  # fmt: skip

#: Resolves one spec as a server does, and prints which frameworks that imports; then asks `datasets` for all.
ORACLE = """
import json, sys
from pathlib import Path
from tokenloom_server.sources.catalog import SourceCatalog
spec = SourceCatalog().spec("hf:org/text:train:text")
assert "datasets" not in sys.modules
assert len(spec.scheme.shards(spec, Path())) == 2
print(*sorted({"datasets", "torch", "jax", "tensorflow"} & sys.modules.keys()))
import datasets
answers = []
for repo, config, revision, split, has_rows in json.load(sys.stdin):
    builder = datasets.load_dataset_builder(repo, config, revision=revision)
    rows = [row["text"] for row in builder.as_streaming_dataset(split=split)] if has_rows else []
    answers.append([[path.partition("@")[2].partition("/")[2] for path in builder.config.data_files[split]], rows])
print(json.dumps(answers))
"""


def rows_of(spec: Spec, shards: Sequence[Shard]) -> list[str]:
    source = open_source(spec, Path(), tuple(shards))
    return [
        row
        for i in range(len(shards))
        for rows in source.read(i, 0)
        for row in rows.column.to_pylist()
    ]


def test_files_and_rows_are_those_of_datasets_in_its_order_and_resolving_imports_no_framework(
    hub: StandInHub, tmp_path: Path
) -> None:
    asked: list[tuple[str, str | None, str | None, str, bool]] = []
    for name, (revisions, splits) in REPOS.items():
        repo = hub.repo(f"org/{name}")
        for ref, content in revisions.items():
            repo.commit(content, ref)
        asked += [(f"org/{name}", *split, True) for split in splits]
    for name, (content, layout_splits) in LAYOUTS.items():
        hub.repo(f"org/layout-{name}").commit(content)
        asked += [
            (f"org/layout-{name}", config, None, split, False) for config, split in layout_splits
        ]
    oracle = subprocess.run(
        [sys.executable, "-c", ORACLE],
        input=json.dumps(asked),
        env={"PATH": "", "USE_TORCH": "0", **hub.environment(tmp_path / "oracle")},
        capture_output=True,
        text=True,
    )
    assert oracle.returncode == 0, oracle.stderr[-3000:]
    imported, answers = oracle.stdout.splitlines()
    assert imported == "datasets"

    for (repo_name, config, revision, split, has_rows), (paths, rows) in zip(
        asked, json.loads(answers), strict=True
    ):
        spec = spec_of(
            f"hf:{repo_name}{'/' + config if config else ''}{'@' + revision if revision else ''}:{split}:text"
        )
        shards = hub_resolver().shards(spec)
        # What several patterns match is there once: no row is repeated within an epoch.
        assert [shard.path.partition("@")[2].partition("/")[2] for shard in shards] == list(
            dict.fromkeys(paths)
        ), spec
        if has_rows:
            assert rows_of(spec, shards) == rows != [], spec

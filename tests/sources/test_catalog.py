"""The catalog of source schemes: what is in it, and what it costs to have one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
from support.catalog import SOURCES
from support.sources import write_table
from tokenloom_server.sources.catalog import BUILT_IN

SPECS = (
    "parquet:a:b:c",
    "jsonl:a:b",
    "txt:a:text",
    "txt:a:paragraph",
    "arrow:a:b",
    "hf:a/b:train:c",
    "megatron:a",
    "megatron-samples:a",
    "npy:a",
    "npy:a:int32",
    "mds:a:b",
    "mds:s3://a/b:c:uint16",
    "litdata:a",
    "litdata:s3://a/b:c",
)

#: Reads and encodes every source of a folder in a process of its own, as a server does.
READ_ALL = """
import sys
from pathlib import Path
from tokenloom_server.sources import parquet_lists
from tokenloom_server.sources.catalog import SourceCatalog
from tokenloom_server.sources.open import open_source
from tokenloom_server.tokenizer.documents import DocumentEncoder
from tokenloom_server.tokenizer.engine import BytesEngine

parquet_lists.MIN_VALUES = 1
encoder = DocumentEncoder(BytesEngine(), vocab_size=300, eot_id=299)
for spec in sys.argv[2:]:
    source = open_source(SourceCatalog().spec(spec), Path(sys.argv[1]))
    for row in (0, 2):
        for rows in source.read(0, row):
            encoder.encode(rows.column)
    assert "pandas" not in sys.modules, spec
"""


def test_specs_are_parsed_without_what_reads_files() -> None:
    code = f"""
import sys
from tokenloom_server.catalog import open_catalog

catalog = open_catalog()
assert [str(catalog.sources.spec(text)) for text in {SPECS}] == list({SPECS})
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert {"pyarrow", "fsspec", "huggingface_hub", "yaml"} & set(done.stdout.split()) <= {"yaml"}


def test_each_scheme_is_there_once_under_its_own_name() -> None:
    assert list(SOURCES.schemes) == [scheme.name for scheme in BUILT_IN]
    assert {spec.partition(":")[0] for spec in SPECS} == set(SOURCES.schemes), (
        "a spec of each is tested"
    )
    assert all(
        scheme.usage.startswith(f"{scheme.name}:") and scheme.plugin is None for scheme in BUILT_IN
    )
    endings = [ending for scheme in BUILT_IN for ending in scheme.all_endings]
    assert len(endings) == len(set(endings)), "a file's name says one scheme"


def test_a_server_that_reads_does_not_import_pandas(tmp_path: Path) -> None:
    ids, texts = [[1, 2], None, [], [3]], ["a", None, "", "b"]
    table = pa.table({"ids": pa.array(ids, pa.list_(pa.int32())), "text": texts})
    write_table(tmp_path / "a.parquet", table)
    write_table(tmp_path / "saved/a.arrow", table, new=pa.ipc.new_file)
    rows = [{"ids": i, "text": t} for i, t in zip(ids, texts, strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    files = ("parquet:a.parquet", "arrow:saved", "jsonl:a.jsonl")
    specs = [f"{file}:{column}" for file in files for column in ("ids", "text")] + [
        "txt:a.txt:text"
    ]
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path), *specs],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr

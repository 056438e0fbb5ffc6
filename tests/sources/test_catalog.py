"""The catalog of source schemes: what is in it, and what it costs to have one."""

from __future__ import annotations

import subprocess
import sys

from support.catalog import SOURCES
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
    assert {spec.partition(":")[0] for spec in SPECS} == set(SOURCES.schemes), "a spec of each is tested"
    assert all(scheme.usage.startswith(f"{scheme.name}:") and scheme.plugin is None for scheme in BUILT_IN)
    endings = [ending for scheme in BUILT_IN for ending in scheme.all_endings]
    assert len(endings) == len(set(endings)), "a file's name says one scheme"

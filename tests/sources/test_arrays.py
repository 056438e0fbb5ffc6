"""Between numpy and Arrow: the same as Arrow's own conversions, without pandas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from tokenloom_server.sources import arrays

INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]

#: Reads and encodes every source of a folder in a process of its own, as a server does.
READ_ALL = """
import sys
from pathlib import Path
from tokenloom_server.sources.parquet import lists as parquet_lists
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


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_numbers_go_both_ways_without_a_copy(kind: pa.DataType) -> None:
    array = pa.array([1, 2, 3, 4, 5], kind)
    for part in (array, array.slice(1, 3), array.slice(5), pa.nulls(0, kind)):
        found = arrays.numbers(part)
        assert found.dtype == kind.to_pandas_dtype()
        assert found.tolist() == part.to_pylist()
        assert arrays.from_numbers(found).equals(part)
    assert np.shares_memory(arrays.numbers(array), array.to_numpy())


def test_a_server_that_reads_does_not_import_pandas(tmp_path: Path) -> None:
    ids, texts = [[1, 2], None, [], [3]], ["a", None, "", "b"]
    table = pa.table({"ids": pa.array(ids, pa.list_(pa.int32())), "text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "saved").mkdir()
    with pa.OSFile(str(tmp_path / "saved" / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    rows = [{"ids": i, "text": t} for i, t in zip(ids, texts, strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    files = ("parquet:a.parquet", "arrow:saved", "jsonl:a.jsonl")
    specs = [f"{file}:{column}" for file in files for column in ("ids", "text")] + ["txt:a.txt:text"]
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path), *specs], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr

"""What a pipeline holds of its sources: below the formula of docs/limits.md, whether they are few or a thousand.

As a program it prints how many bytes a run took at most: ``test_memory.py FOLDER SOURCES FORM SHUFFLE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file
from tokenloom_server.order import builder
from tokenloom_server.order.steps import BatchPlan

LENGTH, BATCH, STEPS, ID_BYTES = 1024, 64, 32, 2
ROWS, ROW_IDS = 400, 500
MIB = 2**20


def bound(sources: int, form: str, shuffle: str) -> int:
    """Bytes: the formula of docs/limits.md, as it stands there, for ids."""
    held = STEPS * BATCH * (4 * LENGTH * ID_BYTES // 3 + 320)
    all_ids = ROWS * ROW_IDS * ID_BYTES
    # Of Parquet a row group, or the window; of Arrow both are mapped.
    decoded = min(2 * MIB, all_ids) if form == "parquet" else 0
    if shuffle == "rows":
        chunks, shuffled = 3 * min(2**18, 2**26 // sources) * ID_BYTES, 64 * ROWS
    else:
        chunks, shuffled = 2 * min(2**19 * ID_BYTES, 2**28 // sources * ID_BYTES, all_ids), 0
    return held + 16 * MIB + sources * (MIB // 4 + chunks + decoded + shuffled)


@pytest.mark.parametrize("shuffle", ["none", "rows"])
@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize("sources", [3, 40, 1000])
def test_sources_take_no_more_than_the_formula(
    sources: int, form: str, shuffle: str, tmp_path: Path
) -> None:
    rows = np.random.default_rng(0).integers(1, 2**15, ROWS * ROW_IDS).astype(np.uint16)
    ids = pa.ListArray.from_arrays(np.arange(0, len(rows) + 1, ROW_IDS, dtype=np.int32), rows)
    table, first = pa.table({"ids": ids}), tmp_path / "0" / f"ids.{form}"
    for source in range(sources):
        (tmp_path / str(source)).mkdir()
    if form == "parquet":
        pq.write_table(table, first)
    else:
        with pa.ipc.new_file(first, table.schema) as file:
            file.write_table(table)
    for source in range(1, sources):
        os.link(first, tmp_path / str(source) / first.name)
    command = [sys.executable, __file__, str(tmp_path), str(sources), form, shuffle]
    taken = int(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    )
    assert taken <= bound(sources, form, shuffle), (
        f"{taken / MIB:.1f} of {bound(sources, form, shuffle) / MIB:.1f} MiB"
    )


def most_taken(folder: Path, sources: int, form: str, shuffle: str) -> int:
    """Anonymous bytes that a run took at most, until each source has given its rows twice."""
    pattern = "{}/*:ids" if form == "parquet" else "{}:ids"
    specs = [f"{form}:{pattern.format(source)}" for source in range(sources)]
    document = {
        "run": "memory",
        "vocab_size": 2**15,
        "end_of_text_id": 0,
        "sequence_length": LENGTH,
        "mixture": {
            "policy": "least_consumed",
            "children": [{"source": spec, "epochs": "inf", "shuffle": shuffle} for spec in specs],
        },
    }
    order = builder.create(
        mixture_file.parse(document, where="memory", catalog=open_catalog()), folder, None
    )
    before, most = anonymous(), 0
    pipeline = order.pipeline(order.initial())
    while pipeline.sample_index * LENGTH < 2 * sources * ROWS * ROW_IDS:
        plan = BatchPlan(
            start_index=pipeline.sample_index,
            world_size=1,
            batch_size=BATCH,
            group_micro_steps=STEPS,
        )
        group = pipeline.begin_group(plan)
        pipeline.fill(group, STEPS)
        most = max(most, anonymous() - before)
    return most


def anonymous() -> int:
    """Bytes of this process that lie in no file."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


if __name__ == "__main__":
    print(most_taken(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))

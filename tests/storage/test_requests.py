"""What a store is asked for while a file is read from its beginning to its end: counted at the store."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from support.s3_server import BUCKET, S3Server, s3_storage
from support.sources import open_source, spec_of
from tokenloom_server.sources import parquet_pages
from tokenloom_server.storage.io_stats import IoStats, RetryPolicy

#: Rows of a thousand ids or characters, in groups of a hundred.
ROWS, WIDTH, GROUP = 3_000, 1_000, 100


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(5)
    ids = rng.integers(0, 2**16, ROWS * WIDTH, np.int32)
    ends = pa.array(np.arange(0, len(ids) + 1, WIDTH, np.int32))
    texts = [rng.integers(33, 91, WIDTH, np.uint8).tobytes().decode() for _ in range(ROWS)]
    table = pa.table({"ids": pa.ListArray.from_arrays(ends, pa.array(ids)), "text": texts})
    for name in ("ids", "text"):
        pq.write_table(table.select([name]), folder / f"{name}.parquet", row_group_size=GROUP)
    (folder / "saved").mkdir()
    with pa.ipc.new_file(str(folder / "saved" / "ids.arrow"), table.schema) as writer:
        writer.write_table(table, GROUP)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "lines.jsonl").write_bytes(lines)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines, 1))
    with s3_storage() as store:
        store.put(folder)
        yield store


@pytest.mark.parametrize(
    ("spec", "requests"),
    [
        ("parquet:{}/ids.parquet:ids", 4),
        ("parquet:{}/text.parquet:text", 2),
        ("arrow:{}/saved:ids", 7),
        ("jsonl:{}/lines.jsonl:text", 3),
        ("jsonl:{}/lines.jsonl.gz:text", 3),
    ],
)
def test_a_file_is_read_once_in_few_and_large_requests(
    store: S3Server, tmp_path: Path, spec: str, requests: int
) -> None:
    # However slow the machine is, nothing is asked for a second time.
    patient = IoStats(RetryPolicy(hedge_s=600.0, attempt_s=600.0))
    source = open_source(spec_of(spec.format(f"s3://{BUCKET}")), tmp_path, io_stats=patient)
    store.requests.clear()
    assert sum(len(rows.column) for rows in source.read(0, 0)) == ROWS
    spans = [
        tuple(map(int, read.range.removeprefix("bytes=").split("-"))) for read in store.reads()
    ]
    assert len(store.requests) <= requests
    assert sum(end + 1 - begin for begin, end in spans) < 1.05 * source.shards[0].size


def test_where_a_file_does_not_say_what_is_next_it_is_said_once(
    store: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(parquet_pages, "MAX_FOOTER_BYTES", 64)
    source = open_source(spec_of(f"parquet:s3://{BUCKET}/text.parquet:text"), tmp_path)
    assert [sum(len(rows.column) for rows in source.read(0, 0)) for _ in range(2)] == [ROWS, ROWS]
    (warning,) = (one.message for one in caplog.records if one.levelname == "WARNING")
    assert (
        "text.parquet': nothing of it is read ahead (no footer, an encrypted one, or a very long one)"
        in warning
    )

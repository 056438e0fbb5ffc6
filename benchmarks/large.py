"""One source that is far larger than what a server may hold: 10 GB of text in row groups of 100 MB.

    python -m benchmarks.large                      # makes the data (10 GB) at the first call
    python -m benchmarks.large --gigabytes 2 --runs 1

Two ranks take all they can for some seconds, from the begin, the middle and the end of the source: the time from rank
0's Join to its first batch, and the most memory that the server had. Once for each way to read it.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from tokenloom import LaunchOptions, RemoteDataset

from benchmarks import corpora
from benchmarks.corpora import CACHE, W2
from benchmarks.processes import Processes, Served, memory_mb, serve
from benchmarks.results import FOLDER, Figures, Result, Row, show

ROW_GROUP_BYTES = 100_000_000
FILES = 4
BATCH_SIZE = 8
SEQUENCE_LENGTH = 2_048
COLUMNS = {
    "first batch ms": "first batch ms",
    "M tokens/s": "M tokens/s",
    "PSS MB": "PSS MB",
    "anonymous MB": "anonymous MB",
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read the source."""

    name: str
    options: dict[str, Any]
    #: Parts of the source's rows at which somebody begins to read.
    places: tuple[float, ...] = (0.0,)


WAYS = (
    Way("in file order", {}, (0.0, 0.5, 0.999)),
    Way("shuffled rows", {"shuffle": "rows"}),
    Way("shuffled rows, 16 lanes", {"shuffle": "rows", "lanes": 16}),
)


def corpus(gigabytes: float, cache: Path = CACHE) -> Path:
    """A folder of Parquet files with one column of text, uncompressed; rows are texts of this machine, shuffled anew
    for each row group and cut at other places, so that no two row groups are alike."""
    folder = cache / f"large-{gigabytes:g}"
    if folder.exists():
        return folder
    texts: list[str] = []
    for path in sorted((corpora.folder_of(W2, cache) / "parquet").rglob("*.parquet")):
        texts += pq.read_table(path).column(0).to_pylist()
    draft = cache / f".{folder.name}"
    draft.mkdir(parents=True, exist_ok=True)
    groups = round(gigabytes * 1e9 / ROW_GROUP_BYTES)
    rng = np.random.default_rng(5)
    for file in range(FILES):
        with pq.ParquetWriter(
            draft / f"{file:05d}.parquet",
            pa.schema([("text", pa.string())]),
            compression="none",
            use_dictionary=False,
        ) as writer:
            for _ in range(file * groups // FILES, (file + 1) * groups // FILES):
                rows, size = [], 0
                while size < ROW_GROUP_BYTES:
                    text = texts[rng.integers(len(texts))]
                    rows.append(text[rng.integers(1 + len(text) // 4) :])
                    size += len(rows[-1].encode())
                writer.write_table(
                    pa.table({"text": pa.array(rows, pa.string())}), row_group_size=len(rows)
                )
    draft.rename(folder)
    return folder


def measure(gigabytes: float, way: Way, runs: int, seconds: float) -> list[Row]:
    """A row for each place."""
    data = corpus(gigabytes)
    spec = f"parquet:{data}/*.parquet:text"
    rows = [Row(name=f"{way.name}, from {place:.1%}", at={"place": place}) for place in way.places]
    document = {
        "run": "large",
        "tokenizer": str(corpora.folder_of(W2) / "tokenizer.json"),
        "sequence_length": SEQUENCE_LENGTH,
        "mixture": {
            "policy": "sequential",
            "children": [{"source": spec, "epochs": 2, **way.options}],
        },
    }
    for _ in range(runs):
        for row in rows:
            # Each in a server of its own: how much memory one needs must not depend on what it did before.
            with Processes(1) as processes:
                mixture = processes.folder / "large.yaml"
                mixture.write_text(yaml.safe_dump(document), encoding="utf-8")
                row.runs.append(
                    _take(serve(processes, mixture), _at(data, spec, row.at["place"]), seconds)
                )
    return rows


def _take(served: Served, state: dict[str, str] | None, seconds: float) -> Figures:
    """Two ranks take all they can."""
    attempt = uuid.uuid4().hex
    ranks = []
    for rank in range(2):
        url = f"grpc://{served.grpc}/large"
        ranks.append(
            RemoteDataset(
                url, BATCH_SIZE, rank=rank, world_size=2, launch=LaunchOptions(attempt=attempt)
            )
        )
        if state is not None:
            ranks[-1].load_state_dict(state)
    streams = [iter(rank) for rank in ranks]
    began = time.monotonic()
    next(streams[0])
    first = time.monotonic()
    tokens, seen, most = 0, first, (0.0, 0.0)
    while seen < first + seconds:
        tokens += sum(next(stream)["input_ids"].numel() for _ in range(20) for stream in streams)
        seen = time.monotonic()
        most = max(most, memory_mb(served.process.pid))
    for dataset in ranks:
        dataset.close()
    return {
        "first batch ms": (first - began) * 1e3,
        "M tokens/s": tokens / (seen - first) / 1e6,
        "PSS MB": most[0],
        "anonymous MB": most[1],
    }


def _at(data: Path, spec: str, place: float) -> dict[str, str] | None:
    """A checkpoint that stands at a part of the source's rows, as an older data loader would have written it."""
    if not place:
        return None
    files = sorted(data.glob("*.parquet"))
    counts = [pq.read_metadata(path).num_rows for path in files]
    row = int(place * sum(counts))
    for path, count in zip(files, counts, strict=True):
        if row < count:
            entry = {"spec": spec, "shard": str(path), "row_offset": row}
            return {"tokenloom": json.dumps({"resume_state": {"datasets": [entry]}})}
        row -= count
    raise AssertionError("a place behind the source")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=10, help="of the source (default 10)")
    parser.add_argument("--runs", type=int, default=2, help="of each (default 2)")
    parser.add_argument(
        "--seconds", type=float, default=5, help="that batches are taken (default 5)"
    )
    parser.add_argument("--json", type=Path, help=f"where the result goes (default below {FOLDER})")
    options = parser.parse_args()
    result = Result.begin(
        "large", f"{options.gigabytes:g} GB of text in row groups of 100 MB, 2 ranks"
    )
    for way in WAYS:
        result.rows += measure(options.gigabytes, way, options.runs, options.seconds)
    show(result, COLUMNS)
    print(f"written to {result.save(options.json or FOLDER / f'{result.date[:10]}-large.json')}")


if __name__ == "__main__":
    main()

"""Parquet over http from a server that answers late: tokens per second of wall time of the pipeline alone, and what it
asked for.

    python -m benchmarks.remote                                   # ids, 40 sources of ids, and text, with 20 and 50 ms
    python -m benchmarks.remote --workload text --delay-ms 20 --seconds 5

The server (`benchmarks.late_server`) is a process of its own. Each run begins with nothing read and nothing cached;
the time until its first samples is shown apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file
from tokenloom_server.order import builder
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import BatchPlan

from benchmarks import corpora
from benchmarks.late_server import late_server
from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import WORKLOADS, Workload

COLUMNS = {
    "first s": "first samples s",
    "M tok/s": "M tokens/s",
    "M tok/CPU-s": "M tokens/CPU-s",
    "MB/s": "MB/s",
    "requests/s": "requests/s",
    "KB each": "KB a request",
}
CASES = ("parquet", "parquet-40", "text")
MORE = ("realistic",)


def measure(workload: Workload, delay_s: float, seconds: float) -> Figures:
    """One run of the pipeline, from its first sample on."""
    folder = corpora.folder_of(workload.corpus)
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w+b") as log:
        with late_server(folder, delay_s, log) as url:
            config = mixture_file.load(workload.write(Path(scratch), url), open_catalog())
            order = builder.create(config, Path(scratch), Path(scratch) / "index")
            pipeline = order.pipeline(order.initial())
            opened = time.monotonic()
            advance(pipeline, 0)
            began, cpu_began = time.monotonic(), time.process_time()
            first, answered = (
                pipeline.sample_index,
                len((Path(scratch) / "log").read_bytes().split()),
            )
            while time.monotonic() - began < seconds and pipeline.ended is None:
                advance(pipeline, pipeline.sample_index)
            wall, cpu = time.monotonic() - began, time.process_time() - cpu_began
        sizes = [int(line) for line in (Path(scratch) / "log").read_bytes().split()[answered:]]
    tokens = (pipeline.sample_index - first) * config.sequence_length / 1e6
    return {
        "first samples s": began - opened,
        "M tokens/s": tokens / wall,
        "M tokens/CPU-s": tokens / cpu,
        "MB/s": sum(sizes) / 1e6 / wall,
        "requests/s": len(sizes) / wall,
        "KB a request": sum(sizes) / 1e3 / max(1, len(sizes)),
    }


def advance(pipeline: Pipeline, start: int) -> None:
    """Makes the next micro-steps, as for one rank."""
    group = pipeline.begin_group(
        BatchPlan(start_index=start, world_size=1, batch_size=8, group_micro_steps=16)
    )
    pipeline.fill(group, 16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", choices=CASES + MORE, action="append", help="all if not given"
    )
    parser.add_argument("--delay-ms", type=float, action="append", help="20 and 50 if not given")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="of each case, in turn (default: %(default)s)"
    )
    options = parser.parse_args()
    delays = options.delay_ms or [20.0, 50.0]
    kept = Result.begin("remote", "Parquet over http, pipeline alone")
    cases = {
        (name, delay): Row(name=f"{name}, {delay:g} ms")
        for name in options.workload or CASES
        for delay in delays
    }
    for _ in range(options.runs):
        for (name, delay), row in cases.items():
            row.runs.append(measure(WORKLOADS[name], delay / 1e3, options.seconds))
    kept.rows += cases.values()
    kept.save()
    show(kept, COLUMNS)


if __name__ == "__main__":
    main()

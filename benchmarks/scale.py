"""Cost against size: throughput, memory and start by shards per source, by sources, and by rows; and by files alone.

    python -m benchmarks.scale                      # about ten minutes and 8 GB of cache, most of it once
    python -m benchmarks.scale --over shards
    python -m benchmarks.scale --over files         # only where named: five minutes; with --files 1000000 half an hour

``shards``   three sources of 1 to 1,000 shards each, of five row groups.
``sources``  1 to 1,000 sources, a row group or more each.
``rows``     one source of 10^6 to 10^9 rows, in shards of 250,000. Shards behind the first are links to it: the server
             sees 4,000 files of 10^9 rows in all, where the disk holds one.
``files``    one source of 10^3 to 10^5 files, or of more, of five blocks, links to twenty: what each file costs ledger,
             index of blocks (which shuffled rows need), checkpoint, memory and start.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import yaml
from tokenloom import RemoteDataset

from benchmarks import corpora, throughput
from benchmarks.corpora import IdCorpus
from benchmarks.processes import Processes, cpu_s, memory_mb, serve
from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import Form, Workload

SIZES: dict[str, tuple[Callable[[int], IdCorpus], tuple[int, ...]]] = {
    "shards": (corpora.shards_corpus, (1, 10, 100, 1_000)),
    "sources": (corpora.sources_corpus, (1, 3, 10, 50, 200, 1_000)),
    "rows": (corpora.rows_corpus, (1, 10, 100, 1_000)),
}
FORMS: tuple[Form, ...] = ("parquet", "arrow")
COLUMNS = {
    "M tok/CPU-s": "M tokens/CPU-s",
    "server ns/tok": "server ns/token",
    "M tok/s": "M tokens/s",
    "PSS MB": "server PSS MB",
    "anon. MB": "server anonymous MB",
    "first start s": "first start s",
    "next start s": "next start s",
}
FILES = (1_000, 10_000, 100_000)
FILES_COLUMNS = {
    name: name
    for name in (
        *("manifest MB", "index MB", "checkpoint kB", "server PSS MB", "first start s", "first start CPU s"),
        *("first batch s", "next start s", "next start CPU s"),
    )
}


def starts(workload: Workload) -> Figures:
    """Seconds until the server is ready: with a new ledger, and again with that ledger and its manifest."""
    with Processes(1) as processes:
        mixture = workload.write(processes.folder)
        first = serve(processes, mixture).ready_s
        processes.end("server")
        # A process that was ended is gone from the files it had open: nothing is left to warm up.
        time.sleep(0.1)
        return {"first start s": first, "next start s": serve(processes, mixture).ready_s}


def run(over: str, form: Form, runs: int, seconds: float) -> list[Row]:
    make, sizes = SIZES[over]
    rows = []
    for size in sizes:
        workload = Workload(name=f"{over}-{size}-{form}", about=f"{size} {over}", corpus=make(size), form=form)
        corpora.folder_of(workload.corpus)
        found = [throughput.measure(workload, seconds) | starts(workload) for _ in range(runs)]
        rows.append(Row(name=f"{form}, {size:,}{' M' * (over == 'rows')} {over}", at={over: size}, runs=found))
    return rows


def files(count: int, shuffle: str) -> Figures:
    """A server of one source of so many files: with a new ledger, and again with that ledger."""
    corpus = corpora.files_corpus(count)
    source = {"source": f"arrow:{corpora.folder_of(corpus)}/arrow/0:ids", "shuffle": shuffle, "epochs": float("inf")}
    document = {"run": "files", "sequence_length": 2_048, "vocab_size": corpus.vocabulary, "end_of_text_id": 0}
    with Processes(1) as processes:
        mixture = processes.folder / "files.yaml"
        mixture.write_text(yaml.safe_dump({**document, "mixture": {"policy": "sequential", "children": [source]}}))
        first = serve(processes, mixture)
        found = {"first start s": first.ready_s, "first start CPU s": cpu_s(first.process.pid)}
        with RemoteDataset(f"grpc://{first.grpc}/files", 8) as dataset:
            began = time.monotonic()
            next(iter(dataset))
            found["first batch s"] = time.monotonic() - began
            found["checkpoint kB"] = len(json.dumps(dataset.state_dict())) / 1e3
        found["server PSS MB"] = memory_mb(first.process.pid)[0]
        processes.end("server")
        with closing(sqlite3.connect(processes.folder / "files.db")) as ledger:
            found["manifest MB"] = ledger.execute("SELECT max(length(record)) FROM runs").fetchone()[0] / 1e6
        found["index MB"] = sum(path.stat().st_size for path in processes.folder.glob(".tokenloom-index/*.npy")) / 1e6
        again = serve(processes, mixture)
        return found | {"next start s": again.ready_s, "next start CPU s": cpu_s(again.process.pid)}


def by_files(counts: Sequence[int], runs: int) -> list[Row]:
    """In file order and shuffled, by number of files."""
    ways = {"none": "in file order", "rows": "shuffled rows"}
    return [
        Row(name=f"{count:,} files, {way}", at={"files": count}, runs=[files(count, shuffle) for _ in range(runs)])
        for count in counts
        for shuffle, way in ways.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", choices=(*SIZES, "files"), action="append", help="one or more; all but files")
    parser.add_argument("--files", type=int, action="append", help=f"how many, for --over files (default {FILES})")
    parser.add_argument("--form", choices=FORMS, action="append", help="parquet or arrow; both if not given")
    parser.add_argument("--runs", type=int, default=1, help="runs of each; medians are shown (default 1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="steady state per run (default 3)")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="also write scale-<over>.json files there")
    options = parser.parse_args()
    for over in options.over or SIZES:
        result = Result.begin(f"scale-{over}", f"2 ranks, by {over}")
        if over == "files":
            result.rows += by_files(options.files or FILES, options.runs)
        for form in (options.form or FORMS) if over in SIZES else ():
            result.rows += run(over, form, options.runs, options.seconds)
        show(result, COLUMNS if over in SIZES else FILES_COLUMNS)
        if options.json:
            result.save(options.json / f"{result.date[:10]}-{result.what}.json")


if __name__ == "__main__":
    main()

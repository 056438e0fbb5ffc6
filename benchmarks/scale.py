"""Cost against size: throughput, memory and start by shards per source, by sources, and by rows.

    python -m benchmarks.scale                      # about ten minutes and 8 GB of cache, most of it once
    python -m benchmarks.scale --over shards

``shards``   three sources of 1 to 1,000 shards each, of five row groups.
``sources``  1 to 1,000 sources, a row group or more each.
``rows``     one source of 10^6 to 10^9 rows, in shards of 250,000. Shards behind the first are links to it: the server
             sees 4,000 files of 10^9 rows in all, where the disk holds one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import corpora, throughput
from benchmarks.corpora import IdCorpus
from benchmarks.processes import Processes, serve
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", choices=SIZES, action="append", help="one or more; all if not given")
    parser.add_argument("--form", choices=FORMS, action="append", help="parquet or arrow; both if not given")
    parser.add_argument("--runs", type=int, default=1, help="runs of each; medians are shown (default 1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="steady state per run (default 3)")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="also write scale-<over>.json files there")
    options = parser.parse_args()
    for over in options.over or SIZES:
        result = Result.begin(f"scale-{over}", f"2 ranks, by {over}")
        for form in options.form or FORMS:
            result.rows += run(over, form, options.runs, options.seconds)
        show(result, COLUMNS)
        if options.json:
            result.save(options.json / f"{result.date[:10]}-{result.what}.json")


if __name__ == "__main__":
    main()

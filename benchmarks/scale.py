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
``small``    the same of small files that are files of their own, of every form, also with shuffled shards:

    python -m benchmarks.scale --over small --files 100000 --form parquet --form jsonl
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
from benchmarks.processes import Processes, Served, cpu_s, memory_mb, serve
from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import Form, Workload

SIZES: dict[str, tuple[Callable[[int], IdCorpus], tuple[int, ...]]] = {
    "shards": (corpora.shards_corpus, (1, 10, 100, 1_000)),
    "sources": (corpora.sources_corpus, (1, 3, 10, 50, 200, 1_000)),
    "rows": (corpora.rows_corpus, (1, 10, 100, 1_000)),
}
FORMS: tuple[Form, ...] = ("parquet", "arrow")
SMALL_FORMS = ("parquet", "arrow", "jsonl")
SHUFFLES = ("none", "shards", "rows")
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
        *(
            "manifest MB",
            "index MB",
            "checkpoint kB",
            "server PSS MB",
            "first start s",
            "first start CPU s",
        ),
        *(
            "first batch s",
            "first batch CPU s",
            "next start s",
            "next start CPU s",
            "next batch s",
            "next batch CPU s",
        ),
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
        workload = Workload(
            name=f"{over}-{size}-{form}", about=f"{size} {over}", corpus=make(size), form=form
        )
        corpora.folder_of(workload.corpus)
        found = [throughput.measure(workload, seconds) | starts(workload) for _ in range(runs)]
        rows.append(
            Row(
                name=f"{form}, {size:,}{' M' * (over == 'rows')} {over}",
                at={over: size},
                runs=found,
            )
        )
    return rows


def files(source: str, shuffle: str) -> Figures:
    """A server of one source of many files: with a new ledger, and again with that ledger."""
    child = {"source": source, "shuffle": shuffle, "epochs": float("inf")}
    document = {
        "run": "files",
        "sequence_length": 2_048,
        "vocab_size": corpora.VOCABULARY,
        "end_of_text_id": 0,
    }
    with Processes(1) as processes:
        mixture = processes.folder / "files.yaml"
        mixture.write_text(
            yaml.safe_dump({**document, "mixture": {"policy": "sequential", "children": [child]}})
        )
        first = serve(processes, mixture)
        found = {"first start s": first.ready_s, "first start CPU s": cpu_s(first.process.pid)}
        found |= first_batch(first, "first")
        found["server PSS MB"] = memory_mb(first.process.pid)[0]
        processes.end("server")
        with closing(sqlite3.connect(processes.folder / "files.db")) as ledger:
            found["manifest MB"] = (
                ledger.execute("SELECT max(length(record)) FROM runs").fetchone()[0] / 1e6
            )
        found["index MB"] = (
            sum(path.stat().st_size for path in processes.folder.glob(".tokenloom-index/*.npy"))
            / 1e6
        )
        again = serve(processes, mixture)
        found |= {"next start s": again.ready_s, "next start CPU s": cpu_s(again.process.pid)}
        return found | first_batch(again, "next")


def first_batch(served: Served, when: str) -> Figures:
    """A trainer without a checkpoint comes, and asks for its first batch."""
    cpu = cpu_s(served.process.pid)
    with RemoteDataset(f"grpc://{served.grpc}/files", 8, resume="fresh") as dataset:
        began = time.monotonic()
        next(iter(dataset))
        found = {
            f"{when} batch s": time.monotonic() - began,
            f"{when} batch CPU s": cpu_s(served.process.pid) - cpu,
        }
        return found | {"checkpoint kB": len(json.dumps(dataset.state_dict())) / 1e3}


def by_files(counts: Sequence[int], runs: int) -> list[Row]:
    """In file order and shuffled, by number of files."""
    ways = {"none": "in file order", "rows": "shuffled rows"}
    sources = {
        count: f"arrow:{corpora.folder_of(corpora.files_corpus(count))}/arrow/0:ids"
        for count in counts
    }
    return [
        Row(
            name=f"{count:,} files, {way}",
            at={"files": count},
            runs=[files(source, shuffle) for _ in range(runs)],
        )
        for count, source in sources.items()
        for shuffle, way in ways.items()
    ]


def by_small_files(
    forms: Sequence[str], counts: Sequence[int], shuffles: Sequence[str], runs: int
) -> list[Row]:
    """By form, number of files and shuffle."""
    rows = []
    for form in forms:
        for count in counts:
            folder = corpora.folder_of(
                corpora.SmallFiles(name=f"small-{count}-{form}", count=count, form=form)
            )
            place = folder / form if form == "arrow" else f"{folder}/{form}/*/*.{form}"
            rows += [
                Row(
                    name=f"{count:,} {form}, shuffle: {shuffle}",
                    at={"files": count},
                    runs=[files(f"{form}:{place}:ids", shuffle) for _ in range(runs)],
                )
                for shuffle in shuffles
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    over_help = "one or more; the first three if not given"
    parser.add_argument(
        "--over", choices=(*SIZES, "files", "small"), action="append", help=over_help
    )
    parser.add_argument(
        "--files",
        type=int,
        action="append",
        help=f"how many, for files and small (default {FILES})",
    )
    parser.add_argument(
        "--form", choices=SMALL_FORMS, action="append", help="all that there are, if not given"
    )
    parser.add_argument(
        "--shuffle", choices=SHUFFLES, action="append", help="for small; all if not given"
    )
    parser.add_argument(
        "--runs", type=int, default=1, help="runs of each; medians are shown (default 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="steady state per run (default 3)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="also write scale-<over>.json files there"
    )
    options = parser.parse_args()
    for over in options.over or SIZES:
        result = Result.begin(f"scale-{over}", f"2 ranks, by {over}")
        if over == "files":
            result.rows += by_files(options.files or FILES, options.runs)
        if over == "small":
            forms, shuffles = options.form or SMALL_FORMS, options.shuffle or SHUFFLES
            result.rows += by_small_files(forms, options.files or FILES, shuffles, options.runs)
        for form in (options.form or FORMS) if over in SIZES else ():
            result.rows += run(over, form, options.runs, options.seconds)
        show(result, COLUMNS if over in SIZES else FILES_COLUMNS)
        if options.json:
            result.save(options.json / f"{result.date[:10]}-{result.what}.json")


if __name__ == "__main__":
    main()

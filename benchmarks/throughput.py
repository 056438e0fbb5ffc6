"""Throughput of the whole service: tokens per CPU-second, user and system of every process, both ends.

    python -m benchmarks.throughput --workload arrow --seconds 5 --runs 5
    python -m benchmarks.throughput --workload text --pace 20e6        # a trainer that takes 20 M tokens/s

Two ranks (eight of the realistic workloads) read from one server over loopback: batch 8 per rank, sequence length
2,048 unless the workload says otherwise, page cache warm. Without ``--pace`` the ranks take all that comes
(saturation); with it each takes its share at a steady pace, and its waits in ``next()`` are those of a trainer whose
data are ready.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import corpora, prototype, tokeniser
from benchmarks.late_server import late_server
from benchmarks.processes import Processes, Window, redis, serve
from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import BATCH_SIZE, HEADLINES, RANKS, WORKLOADS, Form, Workload

#: Tokens per rank until buffers are full and code is warm.
WARM_UP_TOKENS = 4_000_000
COLUMNS = {
    "M tok/CPU-s": "M tokens/CPU-s",
    "of the floor": "of the prototype",
    "server ns/tok": "server ns/token",
    "client ns/tok": "client ns/token",
    "M tok/s": "M tokens/s",
    "wait p50 ms": "wait p50 ms",
    "p99": "wait p99 ms",
    "p99.9": "wait p99.9 ms",
    "PSS MB": "server PSS MB",
    "anon. MB": "server anonymous MB",
    "of the tokeniser": "of the tokeniser alone",
}


def measure(workload: Workload, seconds: float, pace: float = 0.0) -> Figures:
    """One run: a new server, new ranks, their steady state. ``pace``: tokens/s of all ranks together, 0 for all."""
    step_tokens = BATCH_SIZE * workload.sequence_length
    ranks = workload.ranks
    with (
        Processes(ranks) as processes,
        _ledger(workload, processes) as ledger,
        _place(workload, processes) as place,
    ):
        served = serve(processes, workload.write(processes.folder, place), ledger)
        waits = [processes.folder / f"waits-{rank}.npy" for rank in range(ranks)]
        for rank in range(ranks):
            command = [
                sys.executable,
                "-m",
                "benchmarks.trainer",
                "--url",
                f"grpc://{served.grpc}/{workload.name}",
            ]
            command += ["--rank", str(rank), "--world-size", str(ranks), "--attempt", "bench"]
            command += ["--batch-size", str(BATCH_SIZE), "--pace", str(pace / ranks)]
            command += ["--board", str(processes.board.path), "--waits", str(waits[rank])]
            processes.start("client", command)
        window = processes.window(WARM_UP_TOKENS // step_tokens, seconds)
        processes.end("client")
        span = {"from M tokens": window.first.tokens / 1e6, "to M tokens": window.last.tokens / 1e6}
        return (
            prototype.figures(window)
            | _waits(waits, window)
            | (span if workload.reads_once else {})
        )


def run(
    workloads: Sequence[Workload],
    runs: int,
    seconds: float,
    *,
    pace: float = 0.0,
    floor: bool = False,
) -> list[Row]:
    """Rounds in which each workload, and if wanted the prototype and the tokeniser alone, has a run: all share the
    machine's moods."""
    for workload in workloads:
        corpora.folder_of(workload.corpus)
    rows = [Row(name=workload.name) for workload in workloads]
    forms: set[Form] = set()
    for workload in workloads:
        if (
            floor
            and not workload.reads_once
            and (workload.form == "parquet" or workload.form == "arrow")
        ):
            forms.add(workload.form)
    floors = [Row(name=f"prototype, {form}") for form in sorted(forms)]
    alone = Row(name="tokeniser alone")
    for _ in range(runs):
        best: dict[str, float] = {}
        for form, row in zip(sorted(forms), floors, strict=True):
            row.runs.append(prototype.measure(form, seconds))
            best[form] = row.runs[-1]["M tokens/CPU-s"]
        for workload, row in zip(workloads, rows, strict=True):
            figures = measure(workload, seconds, pace)
            if workload.form in best and not workload.reads_once:
                figures["of the prototype"] = figures["M tokens/CPU-s"] / best[workload.form]
            if floor and workload.reads_once:
                span = figures["from M tokens"] * 1e6, figures["to M tokens"] * 1e6
                fastest = tokeniser.tokens_per_cpu_s(tokeniser.measure(), *span) / 1e6
                alone.runs.append({"M tokens/CPU-s": fastest, "server ns/token": 1e3 / fastest})
                figures["of the tokeniser alone"] = figures["M tokens/CPU-s"] / fastest
            row.runs.append(figures)
    return rows + floors + [alone] * bool(alone.runs)


def _waits(files: list[Path], window: Window) -> Figures:
    """Percentiles of all ranks' waits in ``next()`` within the window, ms."""
    found = []
    for path in files:
        asked, waited = np.load(path, allow_pickle=False)
        found.append(waited[(asked >= window.first.at_s) & (asked < window.last.at_s)])
    waits = np.concatenate(found) * 1e3
    names = {"wait p50 ms": 50, "wait p99 ms": 99, "wait p99.9 ms": 99.9, "wait max ms": 100}
    return {name: float(np.percentile(waits, q)) for name, q in names.items()}


@contextlib.contextmanager
def _ledger(workload: Workload, processes: Processes) -> Iterator[str | None]:
    if workload.ledger == "redis":
        with redis(processes) as url:
            yield url
    else:
        yield None


@contextlib.contextmanager
def _place(workload: Workload, processes: Processes) -> Iterator[str | None]:
    """The URL where a workload's corpus is, if it is not on this machine."""
    if workload.delay_ms is None:
        yield None
        return
    folder = corpora.folder_of(workload.corpus)
    with (
        (processes.folder / "late").open("wb") as log,
        late_server(folder, workload.delay_ms / 1e3, log) as url,
    ):
        yield url


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(WORKLOADS)
    parser.add_argument(
        "--workload", choices=WORKLOADS, action="append", metavar="NAME", help=f"of {names}"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each workload; medians are shown (default 3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="steady state per run (default 3)"
    )
    parser.add_argument(
        "--pace", type=float, default=0.0, help="tokens/s that both ranks together take; 0: all"
    )
    parser.add_argument(
        "--floor",
        action="store_true",
        help="also measure the prototype, and the tokeniser alone, for the ratio to them",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    result = Result.begin("throughput", f"{RANKS} ranks, batch {BATCH_SIZE}")
    workloads = [WORKLOADS[name] for name in options.workload] if options.workload else HEADLINES
    result.rows += run(
        workloads, options.runs, options.seconds, pace=options.pace, floor=options.floor
    )
    show(result, COLUMNS)
    if options.json:
        result.save(options.json)


if __name__ == "__main__":
    main()

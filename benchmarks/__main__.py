"""`make bench`: what Tokenloom costs on this machine, in under ten minutes on two cores.

    python -m benchmarks                            # everything; results go to benchmarks/results/
    python -m benchmarks throughput ranks           # some of it
    python -m benchmarks sizes many-ranks all-latencies      # the curves of docs/performance.md; half an hour
    python -m benchmarks --quick                    # one short run of each: does it work at all?

The first call also makes the data, which takes a minute or two more. Judge CPU-seconds and ratios between runs on one
machine and in one hour: every result of ids has the bare prototype's figures of the same minutes beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import mixer, ranks, scale, throughput
from benchmarks.results import FOLDER, Result, from_root, show
from benchmarks.workloads import (
    BATCH_SIZE,
    HEADLINES,
    RANKS,
    REALISTIC,
    REALISTIC_REMOTE,
    VARIANTS,
    WORKLOADS,
)

#: Tokens per second that both ranks together take where they are paced: less than every workload has ready.
PACE = 20e6
#: Where the results of a quick look go, which are not worth keeping.
QUICK_FOLDER = Path("/tmp/tokenloom-bench")


@dataclass(frozen=True, slots=True)
class Effort:
    """How often and how long."""

    headline_runs: int
    runs: int
    seconds: float
    folder: Path


def headlines(effort: Effort) -> None:
    """Tokens per CPU-second, waits and memory of the three main workloads, with the prototype's."""
    result = Result.begin("throughput", f"{RANKS} ranks, batch {BATCH_SIZE}, saturated")
    result.rows += throughput.run(HEADLINES, effort.headline_runs, effort.seconds, floor=True)
    _keep(result, effort, throughput.COLUMNS)


def variants(effort: Effort) -> None:
    """The same for short sequences, 200 sources, a vocabulary of 128k, and the ledger in Redis."""
    result = Result.begin("variants", f"{RANKS} ranks, batch {BATCH_SIZE}, saturated")
    result.rows += throughput.run(VARIANTS, effort.runs, effort.seconds)
    _keep(result, effort, throughput.COLUMNS)


def realistic(effort: Effort) -> None:
    """What large runs look like: 40 sources, shuffled, best_fit, 8 ranks, from this disk and over http."""
    result = Result.begin("realistic", f"{REALISTIC.ranks} ranks, batch {BATCH_SIZE}, saturated")
    # Each source packs windows of 4 M tokens: a short span would count whole windows, or none.
    result.rows += throughput.run([REALISTIC, REALISTIC_REMOTE], effort.runs, 5 * effort.seconds)
    _keep(result, effort, throughput.COLUMNS)


def paced(effort: Effort) -> None:
    """Waits in ``next()`` of a trainer that takes 20 M tokens/s: its data are ready."""
    result = Result.begin("paced", "a trainer that takes 20 M tokens/s on two ranks")
    result.rows += throughput.run(HEADLINES, 1, 2 * effort.seconds, pace=PACE)
    _keep(result, effort, throughput.COLUMNS)


def rank_scaling(effort: Effort) -> None:
    """The server under 2 to 256 simulated ranks."""
    result = Result.begin("ranks", "the server under simulated ranks")
    result.rows += ranks.run(ranks.WORLD_SIZES, WORKLOADS["arrow"], 1, effort.seconds)
    _keep(result, effort, ranks.COLUMNS)


def many_ranks(effort: Effort) -> None:
    """The same up to 2,000 ranks, and more runs: the curve of the documentation."""
    result = Result.begin("many-ranks", "the server under simulated ranks")
    result.rows += ranks.run(
        (*ranks.WORLD_SIZES, 2_000), WORKLOADS["arrow"], effort.runs, 2 * effort.seconds
    )
    _keep(result, effort, ranks.COLUMNS)


def sizes(effort: Effort) -> None:
    """Throughput, memory and start by shards, sources and rows: the curves of the documentation."""
    for over in scale.SIZES:
        result = Result.begin(f"scale-{over}", f"2 ranks, by {over}")
        for form in scale.FORMS:
            result.rows += scale.run(over, form, effort.runs, effort.seconds)
        _keep(result, effort, scale.COLUMNS)


def mixing(effort: Effort) -> None:
    """Nanoseconds per sample of the mixer, by number of sources and nesting."""
    result = Result.begin("mixer", f"the mixer, {mixer.BURST} samples at a time")
    result.rows += mixer.run(effort.runs, 0.2)
    _keep(result, effort, None)


def latencies(effort: Effort) -> None:
    """Start to first batch, restore to first batch against the offset, snapshots while streaming."""
    parts = ("--part", "start", "--part", "restore", "--part", "snapshot")
    _module("latency", effort, *parts, "--workload", "parquet", "--data", "parquet")


def all_latencies(effort: Effort) -> None:
    """The same for text, Arrow, 200 sources and JSON lines, too."""
    _module("latency", effort)


def client(effort: Effort) -> None:
    """The trainer's side alone: CPU per token, waits, and how long the interpreter lock is held."""
    cases = ("--case", "batch-8", "--case", "batch-8-u32", "--case", "batch-1")
    _module("client_path", effort, *cases, "--seconds", str(effort.seconds))


SECTIONS: dict[str, Callable[[Effort], None]] = {
    "throughput": headlines,
    "variants": variants,
    "realistic": realistic,
    "paced": paced,
    "ranks": rank_scaling,
    "mixer": mixing,
    "latency": latencies,
    "client": client,
}
#: Only where named: five to ten minutes each.
LONG: dict[str, Callable[[Effort], None]] = {
    "sizes": sizes,
    "many-ranks": many_ranks,
    "all-latencies": all_latencies,
}


def _keep(result: Result, effort: Effort, columns: dict[str, str] | None) -> None:
    path = effort.folder / f"{result.date[:10]}-{result.what}.json"
    show(result, columns)
    print(f"written to {result.save(path)}\n", flush=True)


def _module(name: str, effort: Effort, *options: str) -> None:
    """A benchmark that is a program of its own: it prints its table and writes its result."""
    path = (
        effort.folder / f"{time.strftime('%Y-%m-%d', time.gmtime())}-{name.replace('_', '-')}.json"
    )
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{name}",
        "--runs",
        str(effort.runs),
        "--json",
        str(path),
        *options,
    ]
    subprocess.run(command, check=True)
    print(f"written to {path}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = f"of {', '.join(SECTIONS)}, which are all if none is given; or {', '.join(LONG)}"
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=names)
    parser.add_argument("--quick", action="store_true", help="one run of a second each")
    parser.add_argument(
        "--folder",
        type=Path,
        help=f"where results go (default {from_root(str(FOLDER))}, or {QUICK_FOLDER} with --quick)",
    )
    options = parser.parse_args()
    sections = SECTIONS | LONG
    unknown = set(options.sections) - set(sections)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    effort = Effort(5, 2, 3.0, options.folder or FOLDER)
    if options.quick:
        effort = Effort(1, 1, 1.0, options.folder or QUICK_FOLDER)
    began = time.monotonic()
    failed = []
    for name in options.sections or SECTIONS:
        print(f"--- {name}: {sections[name].__doc__}", flush=True)
        try:
            sections[name](effort)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            # The other figures are still worth having.
            failed.append(name)
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    print(f"{time.monotonic() - began:.0f} s in all")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

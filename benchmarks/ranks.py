"""What the server pays for many ranks: tokens per CPU-second of the server, memory and evenness, by world size.

    python -m benchmarks.ranks                      # 2, 16, 64 and 256 ranks
    python -m benchmarks.ranks --ranks 2 --ranks 2000 --seconds 10

The ranks are simulated: many streams in a process or two, without tensors (see ``benchmarks.crowd``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.processes import Processes, serve
from benchmarks.prototype import figures
from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import BATCH_SIZE, WORKLOADS, Workload

WORLD_SIZES = (2, 16, 64, 256)
#: One process of light ranks takes what one server sends, up to about so many.
RANKS_PER_CROWD = 500
#: Messages of each rank until the figures count, in steps of the first group's size.
WARM_UP_STEPS = 32
COLUMNS = {
    "M tok/CPU-s of the server": "M tokens/server CPU-s",
    "server ns/tok": "server ns/token",
    "M tok/s": "M tokens/s",
    "gap p50 ms": "gap p50 ms",
    "p99": "gap p99 ms",
    "PSS MB": "server PSS MB",
    "start s": "start s",
}


def measure(workload: Workload, ranks: int, seconds: float, batch_size: int) -> Figures:
    """One run: a new server, so many simulated ranks, their steady state."""
    crowds = -(-ranks // RANKS_PER_CROWD)
    with Processes(crowds) as processes:
        served = serve(processes, workload.write(processes.folder))
        files = [processes.folder / f"gaps-{line}.npy" for line in range(crowds)]
        for line, path in enumerate(files):
            command = [
                sys.executable,
                "-m",
                "benchmarks.crowd",
                "--url",
                f"grpc://{served.grpc}/{workload.name}",
            ]
            command += ["--ranks", f"{line * ranks // crowds}:{(line + 1) * ranks // crowds}"]
            command += ["--world-size", str(ranks), "--batch-size", str(batch_size)]
            command += [
                "--board",
                str(processes.board.path),
                "--line",
                str(line),
                "--gaps",
                str(path),
            ]
            processes.start("crowd", command)
        began = processes.read().at_s
        window = processes.window(max(2, min(WARM_UP_STEPS, 2_000 // ranks)), seconds)
        processes.end("crowd")
        found = figures(window, takers="crowd")
        gaps = np.concatenate([_within(path, window.first.at_s) for path in files]) * 1e3
        return found | {
            "M tokens/server CPU-s": 1e3 / window.ns_per_token("server"),
            "gap p50 ms": float(np.percentile(gaps, 50)),
            "gap p99 ms": float(np.percentile(gaps, 99)),
            "start s": window.first.at_s - began,
        }


def _within(path: Path, begin_s: float) -> npt.NDArray[np.float64]:
    """The gaps between messages that came since then, seconds."""
    came, gaps = np.load(path, allow_pickle=False)
    found: npt.NDArray[np.float64] = gaps[came >= begin_s]
    return found


def run(
    world_sizes: Sequence[int],
    workload: Workload,
    runs: int,
    seconds: float,
    batch_size: int = BATCH_SIZE,
) -> list[Row]:
    return [
        Row(
            name=f"{workload.name}, {ranks} ranks",
            at={"ranks": ranks},
            runs=[measure(workload, ranks, seconds, batch_size) for _ in range(runs)],
        )
        for ranks in world_sizes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, action="append", help=f"one or more; {WORLD_SIZES} if not given"
    )
    parser.add_argument(
        "--workload", choices=WORKLOADS, default="arrow", metavar="NAME", help="default: arrow"
    )
    parser.add_argument(
        "--runs", type=int, default=1, help="runs of each; medians are shown (default 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="steady state per run (default 4)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=BATCH_SIZE,
        help="samples of 2,048 per rank and micro-step",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    result = Result.begin("ranks", "the server under simulated ranks")
    result.rows += run(
        options.ranks or WORLD_SIZES,
        WORKLOADS[options.workload],
        options.runs,
        options.seconds,
        options.batch_size,
    )
    show(result, COLUMNS)
    if options.json:
        result.save(options.json)


if __name__ == "__main__":
    main()

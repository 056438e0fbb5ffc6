"""`make bench-peers`: tokens per CPU-second of Tokenloom and of the loaders that a trainer would otherwise pick.

    python -m benchmarks.peers                          # all; the first call installs and prepares, half an hour
    python -m benchmarks.peers --peers litdata,grain    # those whose names begin so
    python -m benchmarks.peers --list

The same data (W1: ids in Parquet; W2: text), blocks of 2,048, batches of 8, sources mixed 0.7 / 0.25 / 0.05, one run
after the other on one machine. User and system time of every process of a loader counts, over a steady state behind
the warm-up. Tokenloom has two ranks, each in its own process, and makes int64 tensors; the peers, its own
``LocalDataset`` among them, have one, and the others leave their tensors as they are. A peer that does not install, or
fails, is listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import corpora, throughput
from benchmarks.corpora import CACHE, W1, W2, Corpus
from benchmarks.peers import environments
from benchmarks.peers.environments import InstallError
from benchmarks.peers.table import PEERS, Peer
from benchmarks.processes import Processes
from benchmarks.results import ROOT, Figures, Result, Row, show
from benchmarks.workloads import BATCH_SIZE, SEQUENCE_LENGTH, WORKLOADS

CORPORA: dict[str, Corpus] = {"ids": W1, "text": W2}
WARM_UP_STEPS = 20
#: Where start-up counts, the run is so many times longer.
FROM_START = 4
PREPARE_TIMEOUT_S = 1_800.0
#: Our workloads on that data, and what their ratios to a peer are called.
OURS = {"ids": ("parquet", "arrow"), "text": ("text",)}
RATIOS = ("ours / it", "ours, narrow / it")
COLUMNS = {
    "M tok/CPU-s": "M tokens/CPU-s",
    "ours / it": "ours / it",
    "ours, narrow / it": "ours, narrow / it",
    "M tok/s": "M tokens/s",
    "PSS MB": "PSS MB",
}


def measure(peer: Peer, python: Path, data: str, seconds: float) -> Figures:
    """One run of a peer: a new process, its steady state. Raises ``RuntimeError`` with its last words."""
    with Processes(1) as processes:
        command = [*_command(peer, python, data), "--board", str(processes.board.path)]
        processes.start("peer", command, peer.env)
        if peer.counts_from_start:
            window = processes.window(1, FROM_START * seconds, processes.read())
        else:
            window = processes.window(WARM_UP_STEPS, seconds)
        return {
            "M tokens/CPU-s": window.tokens_per_cpu_s / 1e6,
            "M tokens/s": window.tokens / window.seconds / 1e6,
            "PSS MB": window.memory_mb["peer"][0],
        }


def prepare(peer: Peer, python: Path, data: str) -> None:
    """Makes a peer's own form of the data, once. Raises ``RuntimeError`` with its last words."""
    folder = _prepared(peer, data)
    if not peer.prepared or folder.exists():
        return
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    command = [*_command(peer, python, data), "--prepared", str(draft)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **peer.env},
            capture_output=True,
            text=True,
            timeout=PREPARE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"its data were not prepared within {PREPARE_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise RuntimeError(done.stderr)
    draft.rename(folder)


def _command(peer: Peer, python: Path, data: str) -> list[str]:
    command = [
        str(python),
        "-m",
        f"benchmarks.peers.{peer.module}",
        "--corpus",
        str(corpora.folder_of(CORPORA[data])),
    ]
    command += ["--prepared", str(_prepared(peer, data)), "--variant", peer.variant]
    return [*command, "--block", str(SEQUENCE_LENGTH), "--batch", str(BATCH_SIZE)]


def _prepared(peer: Peer, data: str) -> Path:
    return (
        CACHE
        / "peers"
        / "data"
        / f"{corpora.folder_of(CORPORA[data]).name}-{peer.prepared or 'none'}"
    )


@dataclass(slots=True)
class Installed:
    """The environments that are there, and why others are not."""

    pythons: dict[str, Path]
    faults: dict[str, str]
    versions: dict[str, str]

    @classmethod
    def of(cls, peers: Sequence[Peer]) -> Installed:
        """Installs what is missing."""
        found = cls({}, {}, {})
        for name in dict.fromkeys(peer.environment for peer in peers):
            _say(f"environment {name}")
            try:
                found.pythons[name] = environments.python_of(name)
                found.versions |= environments.versions_of(name)
            except InstallError as error:
                found.faults[name] = f"does not install: {error}"
        return found


def compare(
    data: str, peers: Sequence[Peer], installed: Installed, runs: int, seconds: float
) -> Result:
    """Ours and the prototype first, then the peers, best first, and those that failed."""
    result = Result.begin(f"peers-{data}", {"ids": "W1, ids", "text": "W2, text"}[data])
    result.versions = installed.versions | result.versions
    rows = {peer: Row(name=peer.name, note=peer.note) for peer in peers if data in peer.reads}
    failed: set[Peer] = set()
    for peer, row in rows.items():
        fault = installed.faults.get(peer.environment)
        if fault is None:
            _say(f"{data}: {peer.name}: preparing")
            try:
                prepare(peer, installed.pythons[peer.environment], data)
            except RuntimeError as error:
                fault = f"not prepared: {_last_line(error)}"
        if fault is not None:
            row.note = fault
            failed.add(peer)
    own: dict[str, Row] = {}
    # Round by round, so that all share the machine's moods.
    for number in range(runs):
        _say(f"{data}: run {number + 1} of {runs}: tokenloom")
        for row in throughput.run(
            [WORKLOADS[name] for name in OURS[data]], 1, seconds, floor=data == "ids"
        ):
            own.setdefault(row.name, Row(name=row.name)).runs += row.runs
        for peer, row in rows.items():
            if peer in failed:
                continue
            _say(f"{data}: run {number + 1} of {runs}: {peer.name}")
            try:
                figures = measure(peer, installed.pythons[peer.environment], data, seconds)
            except RuntimeError as error:
                row.note = f"failed: {_last_line(error)}"
                failed.add(peer)
                continue
            for heading, name in zip(RATIOS, OURS[data], strict=False):
                figures[heading] = own[name].runs[-1]["M tokens/CPU-s"] / figures["M tokens/CPU-s"]
            row.runs.append(figures)
    result.rows = [_ours(row) for row in own.values()]
    result.rows += sorted(rows.values(), key=lambda row: -row.median.get("M tokens/CPU-s", 0))
    return result


def _ours(row: Row) -> Row:
    """One of our own rows, with a name and figures as the peers' have them."""
    about = {
        "parquet": "int32 ids in Parquet",
        "arrow": "narrow ids in Arrow, prepared offline",
        "text": "text",
    }
    name = row.name if row.name.startswith("prototype") else f"tokenloom, {row.name}"
    both = "over the network, packs during the run, both ends counted"
    note = f"{both}; {about[row.name]}" if row.name in about else "the floor: no state, no ledger"
    runs = [{**run, "PSS MB": run["server PSS MB"]} for run in row.runs]
    return Row(name=name, note=note, runs=runs)


def _last_line(error: RuntimeError) -> str:
    """What an error's logs end with: the error that they name last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error" in line]
    return (named or lines)[-1][:200]


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--peers", metavar="NAME,…", default="", help="only those whose names begin so"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each; medians are shown (default 3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="steady state per run (default 4)"
    )
    parser.add_argument("--list", action="store_true", help="name the peers, and stop")
    parser.add_argument("--folder", type=Path, help="where results go (default benchmarks/results)")
    options = parser.parse_args()
    begins = tuple(filter(None, options.peers.split(",")))
    peers = [peer for peer in PEERS if not begins or peer.name.startswith(begins)]
    if not peers:
        sys.exit(
            f"--peers {options.peers}: no such peer; there are {', '.join(peer.name for peer in PEERS)}"
        )
    if options.list:
        for peer in peers:
            print(f"{peer.name:16} {', '.join(peer.reads):10} {peer.note}")
        return
    installed = Installed.of(peers)
    for data in CORPORA:
        result = compare(data, peers, installed, options.runs, options.seconds)
        show(result, COLUMNS)
        path = options.folder and options.folder / f"{result.date[:10]}-{result.what}.json"
        print(f"written to {result.save(path)}\n", flush=True)


if __name__ == "__main__":
    main()

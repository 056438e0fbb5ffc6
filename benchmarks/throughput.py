"""Throughput of the whole service: tokens per CPU-second, user and system of every process, both ends.

    make bench                                     # all workloads, a few minutes
    .venv/bin/python benchmarks/throughput.py --workload arrow --seconds 5 --runs 5

Two ranks read from one server over loopback: sequence length 2,048, batch 8 per rank, three sources mixed
by weights 0.7 / 0.25 / 0.05, page cache warm. Workloads: ``parquet`` (int32 ids, packed while reading),
``arrow`` (uint16 ids, memory-mapped), ``text`` (parquet, tokenised by a byte-level BPE while reading).
Judge ratios between runs on one machine, not single figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.console import Console
from rich.table import Table

#: Documents, mean length in tokens and spread (log-normal) of the three sources.
SOURCES = ((60_000, 480, 0.9), (15_000, 800, 1.2), (1_500, 3_000, 0.7))
WEIGHTS = (0.7, 0.25, 0.05)
VOCABULARY = 32_000
SEQUENCE_LENGTH, BATCH_SIZE, RANKS = 2_048, 8, 2
WARM_UP_STEPS = 64
WORKLOADS = ("parquet", "arrow", "text")

CLIENT = """
import json, resource, sys, time, torch
from tokenloom import RemoteDataset
torch.set_num_threads(1)
url, rank, world_size, attempt, batch_size, warm_up, seconds = sys.argv[1:]
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
dataset = RemoteDataset(url, int(batch_size), rank=int(rank), world_size=int(world_size), attempt=attempt)
batches = iter(dataset)
for _ in range(int(warm_up)):
    next(batches)
began, used, tokens, waits = time.monotonic(), cpu(), 0, []
while time.monotonic() - began < float(seconds):
    asked = time.perf_counter()
    batch = next(batches)
    waits.append(time.perf_counter() - asked)
    tokens += batch["input_ids"].numel()
wall = time.monotonic() - began
p99 = sorted(waits)[int(len(waits) * 0.99)]
print(json.dumps({"tokens_per_s": tokens / wall, "cpu": (cpu() - used) / wall, "wait_p99": p99}), flush=True)
for batch in batches:  # the other rank may still measure; whoever started us ends us
    pass
"""


def make_ids(folder: Path) -> None:
    """The two workloads of ids: the same documents as Parquet and as mapped Arrow files."""
    rng = np.random.default_rng(0)
    for source, (count, mean, spread) in enumerate(SOURCES):
        lengths = np.maximum(4, rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)).astype(np.int64)
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        ids = np.exp(rng.uniform(0, np.log(VOCABULARY), int(lengths.sum()))).astype(np.int32)
        table = pa.table({"ids": pa.ListArray.from_arrays(offsets, pa.array(ids))})
        pq.write_table(table, folder / f"{source}.parquet", row_group_size=1_000)
        narrow = pa.table({"ids": pa.ListArray.from_arrays(offsets, pa.array(ids.astype(np.uint16)))})
        (folder / f"arrow-{source}").mkdir()
        with (
            pa.OSFile(str(folder / f"arrow-{source}" / "data.arrow"), "wb") as out,
            pa.ipc.new_file(out, narrow.schema) as writer,
        ):
            writer.write_table(narrow, max_chunksize=1_000)


def make_text(folder: Path) -> None:
    """The workload of text: this Python's own library, split over three sources, and a tokeniser for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Path(os.__file__).parent
    files = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    texts = [text for path in files if (text := path.read_text(encoding="utf-8", errors="ignore"))]
    for source, (first, last) in enumerate(((0.0, 0.6), (0.6, 0.9), (0.9, 1.0))):
        part = texts[int(first * len(texts)) : int(last * len(texts))]
        pq.write_table(pa.table({"text": part}), folder / f"text-{source}.parquet", row_group_size=100)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[::8], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_mixture(folder: Path, workload: str) -> Path:
    forms = {"parquet": "parquet:{}.parquet:ids", "arrow": "arrow:arrow-{}:ids", "text": "parquet:text-{}.parquet:text"}
    children = [
        {"source": forms[workload].format(source), "weight": weight, "epochs": float("inf")}
        for source, weight in enumerate(WEIGHTS)
    ]
    document = {
        "run": workload,
        "sequence_length": SEQUENCE_LENGTH,
        "mixture": {"policy": "least_consumed", "children": children},
    }
    document |= (
        {"tokenizer": "tokenizer.json"} if workload == "text" else {"vocab_size": VOCABULARY, "end_of_text_id": 0}
    )
    path = folder / f"{workload}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def measure(folder: Path, workload: str, run: int, seconds: float) -> dict[str, float]:
    """One run: a server, two ranks; the figures of their steady state."""
    ready = folder / f"{workload}-{run}.ready"
    command = [sys.executable, "-m", "tokenloom_server", "serve", str(write_mixture(folder, workload))]
    command += ["--grpc", "127.0.0.1:0", "--rest", "127.0.0.1:0", "--ready-file", str(ready)]
    command += ["--ledger", f"sqlite:///{workload}-{run}.db", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    clients: list[subprocess.Popen[str]] = []
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not become ready (status {server.poll()}); see its messages above")
            time.sleep(0.05)
        url = f"grpc://{json.loads(ready.read_text())['grpc']}/{workload}"
        rest = [str(RANKS), f"bench-{run}", str(BATCH_SIZE), str(WARM_UP_STEPS), str(seconds)]
        for rank in range(RANKS):
            arguments = [sys.executable, "-c", CLIENT, url, str(rank), *rest]
            clients.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
        process = psutil.Process(server.pid)
        # The middle of the clients' own time: they start, and end, together.
        time.sleep(3.0 + seconds * 0.25)
        before, began = process.cpu_times(), time.monotonic()
        time.sleep(seconds * 0.5)
        after, wall = process.cpu_times(), time.monotonic() - began
        memory = process.memory_full_info().pss
        found = [json.loads(client.stdout.readline()) for client in clients if client.stdout is not None]
    finally:
        for child in (*clients, server):
            if child.poll() is None:
                child.send_signal(signal.SIGKILL if child is not server else signal.SIGTERM)
            child.wait(timeout=20)
    tokens = sum(figures["tokens_per_s"] for figures in found)
    server_cpu = (after.user - before.user + after.system - before.system) / wall
    client_cpu = sum(figures["cpu"] for figures in found)
    return {
        "M tokens/CPU-s": tokens / (server_cpu + client_cpu) / 1e6,
        "M tokens/s": tokens / 1e6,
        "server ns/token": server_cpu / tokens * 1e9,
        "client ns/token": client_cpu / tokens * 1e9,
        "server PSS MB": memory / 2**20,
        "next() p99 ms": max(figures["wait_p99"] for figures in found) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="one or more; all if not given")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload; medians are shown (default 3)")
    parser.add_argument("--seconds", type=float, default=6.0, help="steady state per run (default 6)")
    options = parser.parse_args()
    console = Console()
    table = Table(title=f"medians of {options.runs} runs, {os.cpu_count()} cores")
    table.add_column("workload")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with console.status("making the data"):
            make_ids(folder)
            make_text(folder)
        for number, workload in enumerate(options.workload or WORKLOADS):
            runs = []
            for run in range(options.runs):
                with console.status(f"{workload}: run {run + 1} of {options.runs}"):
                    runs.append(measure(folder, workload, run, options.seconds))
            if not number:
                for heading in runs[0]:
                    table.add_column(heading, justify="right")
            medians = {key: statistics.median(figures[key] for figures in runs) for key in runs[0]}
            table.add_row(
                workload, *(f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in medians.values())
            )
    console.print(table)


if __name__ == "__main__":
    main()

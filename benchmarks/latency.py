"""How long one waits: for the first batch behind a start and behind a restore, and for a snapshot while streaming.

    python -m benchmarks.latency                            # all parts, a few minutes
    python -m benchmarks.latency --part start --runs 9
    python -m benchmarks.latency --part restore --data parquet --data jsonl

``start``      from the start of ``tokenloom serve`` to the first batch at a trainer that waits for it, on a new run
               and on one that goes on at the ledger's state. A trainer that waits for long asks ever more seldom
               (up to 5 s apart): these began to wait with the server's start.
``restore``    from a trainer's Join to its first batch, at the begin, the middle and the end of the data, half-way
               between two state boundaries: from the trainer's state; pinned by REST (its call, then the Join); and
               from the ledger behind a restart of the server (from the server's start).
``snapshot``   a Snapshot call while two ranks stream all they can: over gRPC, over gRPC and saved, over REST (saved).
``order``      what a new and a known run cost before anything is served, by sources and shards.

Page cache, line indexes and byte code are warm unless the name says otherwise. The trainer's own imports do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from tokenloom import LaunchOptions, RemoteDataset
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.core.state import State
from tokenloom_server.order import builder, snapshot, state_document
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.run.sizing import MESSAGE_BYTES

from benchmarks import corpora
from benchmarks.corpora import Documents, IdCorpus
from benchmarks.processes import Processes, cpu_s
from benchmarks.results import Figures, Result, Row, show
from benchmarks.workloads import BATCH_SIZE, RANKS, WORKLOADS, Workload
from tests.support.ports import free_port

#: Calls of each kind of snapshot per run.
SNAPSHOTS = 300
#: Between two of them, seconds: nobody asks faster, and the stream is what they wait behind.
SNAPSHOT_EVERY_S = 0.01
#: Steps between the states that are kept while a corpus is gone through.
KEPT_EVERY_GROUPS = 16
#: By then a server has also imported what it needs behind its first batch.
SETTLED_S = 3.0
START = ("parquet", "parquet-200", "text")


# --- the server, and a trainer in this process -----------------------------------------------------


class Served:
    """A server on ports that are known before it starts, with a ledger that outlives it."""

    def __init__(self, processes: Processes, mixture: Path, index_dir: Path | None = None) -> None:
        self._processes = processes
        self._mixture = mixture
        self._index_dir = index_dir or processes.folder / "index"
        self.grpc, self.rest = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.ledger = processes.folder / f"{uuid.uuid4().hex}.db"
        self.ready = processes.folder / "ready.json"
        self.pid = 0

    def start(self) -> float:
        """Starts the process and does not wait for it. Returns the monotonic time of the start."""
        self.ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tokenloom_tools", "serve", str(self._mixture)]
        command += [
            "--grpc",
            self.grpc,
            "--rest",
            self.rest,
            "--ledger",
            f"sqlite:///{self.ledger}",
        ]
        command += [
            "--ready-file",
            str(self.ready),
            "--index-dir",
            str(self._index_dir),
            "--log-level",
            "warning",
        ]
        began = time.monotonic()
        self.pid = self._processes.start("server", command).pid
        return began

    def wait(self) -> None:
        self._processes.wait(self.ready.exists, "the server's ready file")

    def stop(self) -> None:
        self._processes.end("server")

    @property
    def run(self) -> str:
        return self._mixture.stem

    @property
    def ready_at(self) -> float:
        """When the ready file was written, on the monotonic clock."""
        return self.ready.stat().st_mtime_ns / 1e9 - time.time() + time.monotonic()

    def restore(self, text: str) -> None:
        """Pins a snapshot by REST."""
        _post(f"http://{self.rest}/v1/runs/{self.run}/restore", {"snapshot": text})


def _first_batch(
    served: Served, state: str | None = None, resume: str | None = None
) -> tuple[float, RemoteDataset]:
    """Rank 0 of two joins and takes a batch. Returns when it had it, and the dataset, to be closed."""
    dataset = RemoteDataset(
        f"grpc://{served.grpc}/{served.run}",
        BATCH_SIZE,
        rank=0,
        world_size=RANKS,
        launch=LaunchOptions(attempt=uuid.uuid4().hex),
        resume=resume,
    )
    if state is not None:
        dataset.load_state_dict({"tokenloom": state})
    next(iter(dataset))
    return time.monotonic(), dataset


# --- start -----------------------------------------------------------------------------------------


def measure_start(workload: Workload, runs: int) -> list[Row]:
    """From the start of the process: a new run, and one that goes on."""
    new, known = Row(name=f"{workload.name}, new run"), Row(name=f"{workload.name}, goes on")
    with Processes(1) as processes:
        mixture = workload.write(processes.folder)
        for run in range(runs + 1):
            served = Served(processes, mixture)
            for row, resume in ((new, None), (known, "latest")):
                figures = _start(served, resume)
                if run:  # the first warms caches
                    row.runs.append(figures)
    return [new, known]


def _start(served: Served, resume: str | None) -> Figures:
    began = served.start()
    had, dataset = _first_batch(served, resume=resume)
    used = cpu_s(served.pid)
    served.wait()
    ready = served.ready_at
    for _ in range(40):  # so that the run has progress to go on at
        next(iter(dataset))
    dataset.close()
    served.stop()
    return {
        "first batch ms": (had - began) * 1e3,
        "ready ms": (ready - began) * 1e3,
        "server CPU ms": used * 1e3,
    }


# --- restore ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A mixture to restore into."""

    name: str
    about: str
    #: Writes the mixture file into a folder.
    write: Callable[[Path], Path]
    #: Whether each restore finds no line index.
    cold_index: bool = False


def _jsonl(folder: Path) -> Path:
    """The documents of W1 as three files of JSON lines with lists of ids; the mixture for them."""
    made = corpora.folder_of(corpora.W1)
    into = made.with_name(f"{made.name}-jsonl")
    if not into.exists():
        draft = into.with_name(f".{into.name}")
        draft.mkdir(exist_ok=True)
        for source in range(len(corpora.W1.sources)):
            with (draft / f"{source}.jsonl").open("w") as lines:
                for path in sorted((made / "parquet" / str(source)).glob("*.parquet")):
                    for batch in pq.ParquetFile(path).iter_batches(1_000):
                        lines.writelines(
                            f'{{"ids":{row}}}\n' for row in _json_lists(batch.column(0))
                        )
        draft.rename(into)
    document = WORKLOADS["parquet"].document()
    document["run"] = "jsonl"
    for source, child in enumerate(document["mixture"]["children"]):
        child["source"] = f"jsonl:{into}/{source}.jsonl:ids"
    path = folder / "jsonl.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def _json_lists(column: pa.ListArray) -> Iterator[str]:
    return (json.dumps(row, separators=(",", ":")) for row in column.to_pylist())


DATA = (
    Data(name="parquet", about="W1, 0.6 GB of int32 ids", write=WORKLOADS["parquet"].write),
    Data(name="parquet-200", about="200 sources", write=WORKLOADS["parquet-200"].write),
    Data(name="arrow", about="W1, narrow ids, mapped", write=WORKLOADS["arrow"].write),
    Data(name="jsonl", about="W1 as 0.9 GB of JSON lines", write=_jsonl),
    Data(name="jsonl-cold", about="the same, without a line index", write=_jsonl, cold_index=True),
)


def measure_restore(data: Data, runs: int) -> list[Row]:
    with Processes(1) as processes:
        mixture = _once_through(data.write(processes.folder))
        index = processes.folder / "index"
        order = builder.create(config.load(mixture, open_catalog()), mixture.parent, index)
        rows = []
        for place, text in zip(("begin", "middle", "end"), snapshots(order), strict=True):
            row = Row(name=f"{data.name}, {place}")
            for run in range(runs + 1):
                figures = _restore(
                    processes,
                    mixture,
                    processes.folder / f"index-{run}-{place}" if data.cold_index else index,
                    text,
                )
                if run:
                    row.runs.append(figures)
            rows.append(row)
        return rows


def _restore(processes: Processes, mixture: Path, index: Path, text: str) -> Figures:
    """The three ways to a sample, each with a ledger of its own behind it."""
    served = Served(processes, mixture, index)
    served.start()
    served.wait()
    time.sleep(SETTLED_S)
    figures = {}
    used, began = cpu_s(served.pid), time.monotonic()
    had, dataset = _first_batch(served, state=text)
    figures["by state ms"] = (had - began) * 1e3
    figures["CPU ms"] = (cpu_s(served.pid) - used) * 1e3
    dataset.close()
    served.stop()
    began = served.start()
    had, dataset = _first_batch(served, resume="latest")
    figures["restart, latest ms"] = (had - began) * 1e3
    dataset.close()
    time.sleep(SETTLED_S)
    began = time.monotonic()
    served.restore(text)
    pinned = time.monotonic()
    had, dataset = _first_batch(served)
    figures["POST ms"] = (pinned - began) * 1e3
    figures["then Join ms"] = (had - pinned) * 1e3
    dataset.close()
    served.stop()
    return figures


def _once_through(mixture: Path) -> Path:
    """The mixture with an end: each source is read once."""
    document = yaml.safe_load(mixture.read_text())
    for child in document["mixture"]["children"]:
        child["epochs"] = 1
    mixture.write_text(yaml.safe_dump(document), encoding="utf-8")
    return mixture


def snapshots(order: PipelineFactory) -> list[str]:
    """Snapshots near the begin, the middle and the end of the data, half a group behind a state boundary."""
    step = BATCH_SIZE * order.form.sample_bytes
    plan = BatchPlan(
        start_index=0,
        world_size=RANKS,
        batch_size=BATCH_SIZE,
        group_micro_steps=max(1, MESSAGE_BYTES // step),
    )
    pipeline = order.pipeline(order.initial())
    states = [pipeline.state()]
    while pipeline.ended is None:
        pipeline.advance(KEPT_EVERY_GROUPS * plan.group_samples)
        states.append(pipeline.state())
    template = order.record.template(uuid.uuid4().hex, "train", 1)
    found = []
    for fraction in (0.0, 0.5, 0.9):
        state = max(
            (state for state in states if state.sample_index <= fraction * states[-1].sample_index),
            key=_index,
        )
        pipeline = order.pipeline(state)
        pipeline.advance(plan.group_samples // 2)
        there = pipeline.state()
        shape = order.record.shape
        found.append(
            snapshot.compose(
                template, *(state_document.encode_state(each, shape) for each in (state, there))
            )
        )
    return found


def _index(state: State) -> int:
    return state.sample_index


# --- snapshot --------------------------------------------------------------------------------------


def measure_snapshot(workload: Workload, runs: int) -> list[Row]:
    rows = [Row(name=f"{workload.name}, {how}") for how in ("gRPC", "gRPC, saved", "REST, saved")]
    for _ in range(runs):
        with _streaming(workload) as served, grpc.insecure_channel(served.grpc) as channel:
            stub = DataLoaderStub(channel)
            url = f"http://{served.rest}/v1/runs/{served.run}/snapshots"
            ways: Sequence[Callable[[], Any]] = (
                partial(stub.Snapshot, wire.SnapshotRequest(run=served.run, sample_index=-1)),
                partial(
                    stub.Snapshot, wire.SnapshotRequest(run=served.run, sample_index=-1, save=True)
                ),
                partial(_post, url, {}),
            )
            for row, call in zip(rows, ways, strict=True):
                row.runs.append(_percentiles(_timed(call)))
    return rows


@contextmanager
def _streaming(workload: Workload) -> Iterator[Served]:
    """A server at work: two ranks take all they can."""
    with Processes(RANKS) as processes:
        served = Served(processes, workload.write(processes.folder))
        served.start()
        served.wait()
        for rank in range(RANKS):
            command = [
                sys.executable,
                "-m",
                "benchmarks.trainer",
                "--url",
                f"grpc://{served.grpc}/{served.run}",
            ]
            command += ["--rank", str(rank), "--world-size", str(RANKS), "--attempt", "bench"]
            command += [
                "--board",
                str(processes.board.path),
                "--waits",
                str(processes.folder / f"waits-{rank}.npy"),
            ]
            processes.start("client", command)
        processes.wait(lambda: processes.board.slowest_steps >= 200, "the steady state")
        yield served


def _timed(call: Callable[[], Any]) -> list[float]:
    """How long each of ``SNAPSHOTS`` calls took, ms, one behind the other."""
    call()
    found = []
    for _ in range(SNAPSHOTS):
        time.sleep(SNAPSHOT_EVERY_S)
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def _percentiles(found: Sequence[float]) -> Figures:
    return {f"p{q} ms": float(np.percentile(found, q)) for q in (50, 99)} | {"max ms": max(found)}


def _clocked(what: str, make: Callable[[], PipelineFactory], figures: Figures) -> PipelineFactory:
    began, used = time.perf_counter(), time.process_time()
    made = make()
    figures[f"{what} ms"] = (time.perf_counter() - began) * 1e3
    figures[f"{what} CPU ms"] = (time.process_time() - used) * 1e3
    return made


# --- order -----------------------------------------------------------------------------------------


def _created(mixture: Path) -> PipelineFactory:
    return builder.create(config.load(mixture, open_catalog()), mixture.parent, None)


def measure_order(sources: int, shards: int, runs: int) -> Row:
    """``builder.create`` and ``builder.load`` of so many sources of so many shards (links to one file), in process."""
    corpus = IdCorpus(
        name=f"order-{sources}x{shards}", sources=(Documents(count=1_000),) * sources, links=shards
    )
    workload = Workload(name="order", about="", corpus=corpus)
    row = Row(
        name=f"{sources} sources of {shards} shards", at={"sources": sources, "shards": shards}
    )
    with Processes(1) as processes:
        mixture = workload.write(processes.folder)
        for run in range(runs + 1):
            figures: Figures = {}
            order = _clocked("create", partial(_created, mixture), figures)
            loaded = config.load(mixture, open_catalog())
            _clocked(
                "load",
                partial(builder.load, loaded, mixture.parent, None, order.record.to_json()),
                figures,
            )
            if run:
                row.runs.append(figures)
    return row


# ---------------------------------------------------------------------------------------------------


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        request, timeout=60
    ) as answer:
        return json.load(answer)


PARTS = ("start", "restore", "snapshot", "order")
ORDERS = ((3, 1), (3, 100), (3, 1_000), (200, 1), (200, 100))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="one or more; all if not given"
    )
    parser.add_argument(
        "--workload",
        choices=WORKLOADS,
        action="append",
        metavar="NAME",
        help="of start and snapshot",
    )
    parser.add_argument(
        "--data", choices=[data.name for data in DATA], action="append", help="of restore"
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="runs of each; medians are shown (default 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Result.begin("latency", "latency, ms")
    for part in options.part or PARTS:
        rows: list[Row] = []
        if part == "start":
            for name in options.workload or START:
                rows += measure_start(WORKLOADS[name], options.runs)
        elif part == "restore":
            for data in DATA:
                if data.name in (options.data or [each.name for each in DATA]):
                    rows += measure_restore(data, options.runs)
        elif part == "snapshot":
            for name in options.workload or START[:2]:
                rows += measure_snapshot(WORKLOADS[name], options.runs)
        else:
            rows = [measure_order(sources, shards, options.runs) for sources, shards in ORDERS]
        show(Result(what=part, title=part, rows=rows))
        kept.rows += [Row(name=f"{part}: {row.name}", runs=row.runs, at=row.at) for row in rows]
    if options.json:
        kept.save(options.json)


if __name__ == "__main__":
    main()

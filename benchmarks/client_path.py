"""The trainer's side alone: what a batch costs in the trainer's process, and how long ``next()`` takes.

    .venv/bin/python benchmarks/client_path.py
    .venv/bin/python benchmarks/client_path.py --case batch-1 --seconds 5

A replaying server in a process of its own sends synthetic batches over loopback, by the real wire contract and
within the credits, so that nothing but the client is measured. Three phases per run:

``flat out``   the trainer takes batches and reads both columns, each element once (their sums): CPU (user + system) of
               its process per token and per step, and what of it the reading alone is. The bare prototype makes one
               column and reads none.
``ready``      the trainer is busy in Python for a while between two batches, so that each is ready when it is
               asked for: how long ``next()`` takes.
``hold``       in the same phase: the longest time for which the busy trainer did not get on although it could have
               run, that is, for which the background threads held the interpreter lock. Time for which it ran itself
               (on a virtual machine that was stolen, too), or the machine ran something else instead (the run queue's
               delay, as Linux counts it), is taken off.

Judge ratios between runs on one machine, not single figures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderServicer

from benchmarks.results import Result, Row, show

RUN = "replay"
SERVICE = wire.DESCRIPTOR.services_by_name["DataLoader"]
VOCABULARY = 32_000
WARM_UP_STEPS = 200
#: Python work of the trainer between two batches in the phases ``ready`` and ``hold``, seconds.
BUSY_S = 0.001
#: Different messages that the server repeats: more bytes than a core's own cache holds.
MESSAGES = 8


@dataclass(frozen=True)
class Case:
    """What travels."""

    batch_size: int
    sequence_length: int
    message_steps: int
    id_bytes: int = 2


CASES = {
    "batch-8": Case(batch_size=8, sequence_length=2_048, message_steps=64),
    "batch-8-u32": Case(batch_size=8, sequence_length=2_048, message_steps=32, id_bytes=4),
    "batch-8-512": Case(batch_size=8, sequence_length=512, message_steps=256),
    "batch-1": Case(batch_size=1, sequence_length=2_048, message_steps=256),
    "batch-1-512": Case(batch_size=1, sequence_length=512, message_steps=256),
}


class Replay(DataLoaderServicer):
    """One run for any number of ranks, each of which gets the same ids."""

    def __init__(self, case: Case) -> None:
        self._case = case
        size = case.message_steps * case.batch_size * case.sequence_length
        rng = np.random.default_rng(0)
        narrow = np.dtype(f"<u{case.id_bytes}")
        self._ids = [
            rng.integers(0, VOCABULARY, size).astype(narrow).tobytes() for _ in range(MESSAGES)
        ]

    def Join(self, request: wire.JoinRequest, context: grpc.ServicerContext) -> wire.JoinResponse:  # noqa: N802
        return wire.JoinResponse(
            run_uid=RUN,
            generation=1,
            start_digest="0" * 32,
            sequence_length=self._case.sequence_length,
            id_type=wire.IdType.Name(self._case.id_bytes),
            labels=wire.LABELS_SAME,
            vocab_size=VOCABULARY,
            group_micro_steps=self._case.message_steps,
            snapshot_template=b"{}",
            base=wire.Base(sample_index=0, resume_state=b"{}"),
        )

    def Stream(  # noqa: N802
        self, requests: Iterator[wire.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        opened = next(requests).open
        limit = Limit(opened.progress, self._case.batch_size)
        threading.Thread(target=limit.follow, args=(requests,), daemon=True).start()
        end, step = opened.received_through, self._case.batch_size
        number = 0
        while limit.wait_for(end + self._case.message_steps * step):
            begin, ends = end, range(end + step, end + self._case.message_steps * step + 1, step)
            end = ends[-1]
            infos = [
                wire.MicroStep(
                    end_index=at,
                    total_tokens=at * self._case.sequence_length,
                    digest=f"{at:032x}",
                    tokens=step * self._case.sequence_length,
                    label_tokens=step * (self._case.sequence_length - 1),
                )
                for at in ends
            ]
            number += 1
            yield wire.StreamResponse(
                batches=wire.Batches(
                    begin_index=begin,
                    micro_steps=infos,
                    ids=self._ids[number % MESSAGES],
                    source_ids=[0] * (len(infos) * step),
                    base=wire.Base(sample_index=begin, resume_state=b"{}"),
                ),
                committed_through=limit.consumed_through,
            ).SerializeToString()


class Limit:
    """How far a rank's credits reach."""

    def __init__(self, progress: wire.Progress, step: int) -> None:
        self._step = step
        self._changed = threading.Condition()
        self._progress = progress
        self._over = False

    @property
    def consumed_through(self) -> int:
        return self._progress.consumed_through

    def follow(self, requests: Iterator[wire.StreamRequest]) -> None:
        try:
            for request in requests:
                with self._changed:
                    self._progress = request.progress
                    self._changed.notify()
        except Exception:
            pass  # the call was cancelled
        with self._changed:
            self._over = True
            self._changed.notify()

    def wait_for(self, end: int) -> bool:
        """Waits until a message that ends at ``end`` is within the credits; False when the stream is over."""

        def within() -> bool:
            return (
                end
                <= self._progress.consumed_through + self._progress.credit_micro_steps * self._step
            )

        with self._changed:
            self._changed.wait_for(lambda: self._over or within())
            return not self._over


def serve(case: Case) -> None:
    """Serves until its input ends; prints the port."""
    replay = Replay(case)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Join": grpc.unary_unary_rpc_method_handler(
            replay.Join, wire.JoinRequest.FromString, wire.JoinResponse.SerializeToString
        ),
        "Stream": grpc.stream_stream_rpc_method_handler(
            replay.Stream, wire.StreamRequest.FromString, None
        ),
    }
    server = grpc.server(
        futures.ThreadPoolExecutor(16), options=[("grpc.max_send_message_length", -1)]
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()  # ends with the process that started us
    os._exit(0)  # gRPC's own end may hang on calls that were cancelled


def train(port: int, case: Case, rank: int, ranks: int, seconds: float) -> None:
    """A trainer that uses nothing but the public interface; prints its figures as JSON."""
    import torch
    from tokenloom import LaunchOptions, RemoteDataset

    torch.set_num_threads(1)
    url = f"grpc://127.0.0.1:{port}/{RUN}"
    with RemoteDataset(
        url, case.batch_size, rank=rank, world_size=ranks, launch=LaunchOptions(attempt="a")
    ) as dataset:
        batches = iter(dataset)
        for _ in range(WARM_UP_STEPS):
            next(batches)
        figures = _flat_out(batches, case, seconds) | _ready(batches, seconds)
    print(json.dumps(figures), flush=True)


def _flat_out(batches: Iterator[Any], case: Case, seconds: float) -> dict[str, float]:
    steps = 0
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    while time.monotonic() - began < seconds:
        batch = next(batches)
        _read(batch)
        steps += 1
    after, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    assert batch["input_ids"].shape == (case.batch_size, case.sequence_length)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    tokens = steps * case.batch_size * case.sequence_length
    began_s = time.thread_time()
    for _ in range(WARM_UP_STEPS):
        _read(batch)
    reading_s = (time.thread_time() - began_s) / WARM_UP_STEPS * steps
    return {
        "CPU ns/token": (user + system) / tokens * 1e9,
        "of it reading": reading_s / tokens * 1e9,
        "of it system": system / tokens * 1e9,
        "CPU µs/step": (user + system) / steps * 1e6,
        "faults/Mtoken": (after.ru_minflt - before.ru_minflt) / tokens * 1e6,
        "switches/Mtoken": (after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw)
        / tokens
        * 1e6,
        "M tokens/s": tokens / wall / 1e6,
    }


def _read(batch: Any) -> None:
    """Reads both columns, as who trains does."""
    batch["input_ids"].sum()
    batch["labels"].sum()


def _ready(batches: Iterator[Any], seconds: float) -> dict[str, float]:
    waits, holds = [], []
    clock, own_clock = time.perf_counter, time.thread_time
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        busy_until = clock() + BUSY_S
        queued = _queued_s()
        last = now = clock()
        own_last = own_clock()
        longest = 0.0
        while now < busy_until:  # Python that could go on at any time, but for the interpreter lock
            now, own = clock(), own_clock()
            longest = max(longest, now - last - (own - own_last))
            last, own_last = now, own
        holds.append(max(0.0, longest - (_queued_s() - queued)))
        asked = clock()
        next(batches)
        waits.append(clock() - asked)
    waits.sort()
    p50, p99, p999 = (
        waits[min(len(waits) - 1, int(len(waits) * share))] * 1e6 for share in (0.5, 0.99, 0.999)
    )
    return {
        "next() p50 µs": p50,
        "p99 µs": p99,
        "p99.9 µs": p999,
        "max µs": waits[-1] * 1e6,
        "longest hold µs": max(holds) * 1e6,
    }


def _queued_s() -> float:
    """For how long this thread was ready to run and the machine ran others."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def measure(name: str, ranks: int, seconds: float) -> dict[str, float]:
    """One run: the figures of the rank for which each is worst."""
    me = [
        sys.executable,
        "-m",
        "benchmarks.client_path",
        "--case",
        name,
        "--seconds",
        str(seconds),
        "--ranks",
        str(ranks),
    ]
    with subprocess.Popen(
        [*me, "--role", "server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        port = server.stdout.readline().strip()
        trainers = [
            subprocess.Popen(
                [*me, "--role", "trainer", "--port", port, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            answers = [trainer.communicate(timeout=60 + 4 * seconds)[0] for trainer in trainers]
        finally:
            for trainer in trainers:
                trainer.kill()
            server.stdin.close()
    found = [json.loads(answer) for answer in answers]
    return {key: max(figures[key] for figures in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", choices=CASES, action="append", help="one or more; all if not given"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="trainers at the same time (default 1)"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each case; medians are shown (default 3)"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each phase (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--role", choices=("server", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.case or list(CASES)
    if options.role == "server":
        return serve(CASES[names[0]])
    if options.role == "trainer":
        return train(options.port, CASES[names[0]], options.rank, options.ranks, options.seconds)

    result = Result.begin("client-path", f"the client alone, {options.ranks} rank(s)")
    console = Console(stderr=True)
    for name in names:
        fields = ", ".join(f"{key} {value}" for key, value in asdict(CASES[name]).items())
        row = Row(name=name, note=fields)
        for run in range(options.runs):
            with console.status(f"{name}: run {run + 1} of {options.runs}"):
                row.runs.append(measure(name, options.ranks, options.seconds))
        result.rows.append(row)
    show(result)
    if options.json:
        result.save(options.json)
    return None


if __name__ == "__main__":
    main()

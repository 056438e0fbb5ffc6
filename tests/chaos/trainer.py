"""Ranks as processes of their own, forked from one that has imported all that they need.

Each writes down what ``next()`` gave it and now and then its state, both by appending to a file of its own, so that
nothing is lost when it is killed. It trusts the dataset in nothing: what it writes are the tensors.

As a program (``python -m chaos.trainer``) this is the process that forks: it reads commands from its standard input and
says on its standard output which rank ended how, each as a line of JSON. When its input ends, it ends with all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chaos.processes import environment
from chaos.records import record_type

#: What a rank's process returns when it ended with an error of the dataset's.
FAILED = 3
_DEADLINE_S = 30.0
#: How long a rank waits for its servers before it gives up.
RANK_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank is to do. ``state`` is the text of a loaded state, empty for none."""

    folder: str
    url: str
    rank: int
    world_size: int
    batch_size: int
    attempt: str
    state: str
    resume: str
    prefetch_steps: int
    #: Mean pause between two steps, seconds; the pauses vary.
    pace_s: float
    #: Steps between two states that are written down.
    checkpoint_every: int
    takeover: bool

    @property
    def name(self) -> str:
        return f"{self.attempt}/{self.rank}"


class Ranks:
    """The supervisor's side: starts ranks, signals them, and knows which ended."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "chaos.trainer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=environment(),
            )
        self._ended: dict[str, int] = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="ranks", daemon=True)
        self._reader.start()

    def start(self, plan: RankPlan) -> None:
        self._tell({"start": asdict(plan)})

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signals a rank; one that has ended is left alone."""
        self._tell({"signal": int(number), "name": name})

    def status(self, name: str) -> int | None:
        """How a rank ended, negative for a signal; None while it runs."""
        return self._ended.get(name)

    def wait(self, name: str, seconds: float) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self._ended, seconds)
            return self._ended.get(name)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_DEADLINE_S)
        self._reader.join(_DEADLINE_S)
        self._process.stdout.close()

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._changed:
                self._ended[said["name"]] = said["status"]
                self._changed.notify_all()


# A rank


def train(plan: RankPlan) -> None:
    """Trains until it is told to stop (a file ``stop`` with a sample index), the data end, or an error comes."""
    from tokenloom import ConnectionOptions, RemoteDataset

    folder = Path(plan.folder)
    draw = random.Random(plan.name)
    record = np.zeros(1, record_type(plan.batch_size))
    steps = os.open(folder / f"rank-{plan.rank}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    states = os.open(folder / f"rank-{plan.rank}.states", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    stop = folder / "stop"
    dataset = RemoteDataset(
        plan.url,
        plan.batch_size,
        rank=plan.rank,
        world_size=plan.world_size,
        attempt=plan.attempt,
        resume=plan.resume or None,
        takeover=plan.takeover,
        connection=ConnectionOptions(
            prefetch_steps=plan.prefetch_steps,
            connect_timeout_s=RANK_PATIENCE_S,
            reconnect_timeout_s=RANK_PATIENCE_S,
        ),
    )
    if plan.state:
        dataset.load_state_dict(json.loads(plan.state))
    for number, batch in enumerate(dataset, 1):
        record["generation"] = dataset.generation
        record["end"] = batch["sample_index"]
        record["tokens"] = batch["total_tokens"]
        record["digest"] = dataset.digest.encode()
        record["at"] = time.time()
        record["samples"] = batch["sample_ids"].numpy()
        record["sources"] = batch["source_ids"].numpy()
        record["ids"] = batch["input_ids"].numpy()
        os.write(steps, record.tobytes())
        if number % plan.checkpoint_every == 0:
            line = {"end": batch["sample_index"], "state": json.dumps(dataset.state_dict())}
            os.write(states, (json.dumps(line) + "\n").encode())
        if stop.exists() and batch["sample_index"] >= int(stop.read_text()):
            break
        if plan.pace_s:
            time.sleep(draw.expovariate(1 / plan.pace_s))
    dataset.close()
    _write_end(folder, plan.rank, {"error": None, "index": dataset.sample_index, "reason": dataset.end_reason})


def _write_end(folder: Path, rank: int, end: dict[str, Any]) -> None:
    (folder / f"rank-{rank}.end.json").write_text(json.dumps(end), encoding="utf-8")


def _run_child(plan: RankPlan) -> int:
    folder = Path(plan.folder)
    log = os.open(folder / f"rank-{plan.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, onto in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, onto)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", force=True)
    try:
        train(plan)
    except Exception as error:
        logging.exception("rank %d ends", plan.rank)
        _write_end(folder, plan.rank, {"error": type(error).__name__, "message": str(error)})
        return FAILED
    return 0


# The process that forks


class _Forks:
    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def run(self) -> None:
        wakes, woken = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        commands = sys.stdin.fileno()
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(commands, selectors.EVENT_READ)
            selector.register(wakes, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if wakes.fileno() in ready:
                    wakes.recv(4096)
                    self._reap(os.WNOHANG)
                if commands in ready:
                    data = os.read(commands, 65536)
                    if not data:
                        break
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self._do(json.loads(line))
        for pid in self._names:
            os.kill(pid, signal.SIGKILL)
        self._reap(0)

    def _do(self, command: dict[str, Any]) -> None:
        if "signal" in command:
            for pid, name in self._names.items():
                if name == command["name"]:
                    os.kill(pid, command["signal"])
            return
        plan = RankPlan(**command["start"])
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = 99
            try:
                status = _run_child(plan)
            finally:
                os._exit(status)
        self._names[pid] = plan.name

    def _reap(self, options: int) -> None:
        while self._names:
            pid, status = os.waitpid(-1, options)
            if not pid:
                return
            ended = {"name": self._names.pop(pid), "status": os.waitstatus_to_exitcode(status)}
            print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    import grpc  # noqa: F401
    import tokenloom  # noqa: F401
    import torch

    torch.set_num_threads(1)
    _Forks().run()

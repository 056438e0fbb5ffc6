"""Ranks as processes of their own, forked from one that has imported all that they need.

Each writes down what ``next()`` gave it and now and then its state, both by appending to a file of its own, so that
nothing is lost when it is killed. It trusts the dataset in nothing: what it writes are the tensors.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tokenloom
from support.forks import Fork, Forks
from tokenloom import ConnectionOptions, LaunchOptions

from chaos.records import record_type

#: What a rank's process returns when it ended with an error of the dataset's.
FAILED = 3
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


@cache
def _forks() -> Forks:
    forks = Forks("grpc", "torch", "tokenloom", "chaos.trainer", options=("-W", "error"))
    atexit.register(forks.close)
    return forks


class Ranks:
    """The supervisor's side: starts ranks, signals them, and knows which ended."""

    def __init__(self) -> None:
        self._ranks: dict[str, Fork] = {}

    def start(self, plan: RankPlan) -> None:
        log = Path(plan.folder) / f"rank-{plan.rank}.log"
        self._ranks[plan.name] = _forks().fork(
            "chaos.trainer:main", [json.dumps(asdict(plan))], output=log
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signals a rank; one that has ended is left alone."""
        if name in self._ranks:
            self._ranks[name].send_signal(number)

    def status(self, name: str) -> int | None:
        """How a rank ended, negative for a signal; None while it runs."""
        return self._ranks[name].poll() if name in self._ranks else None

    def wait(self, name: str, seconds: float) -> int:
        return self._ranks[name].wait(seconds)

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.kill()
        for rank in self._ranks.values():
            rank.wait()


# A rank


def train(plan: RankPlan) -> None:
    """Trains until it is told to stop (a file ``stop`` with a sample index), the data end, or an error comes."""
    folder = Path(plan.folder)
    draw = random.Random(plan.name)
    record = np.zeros(1, record_type(plan.batch_size))
    steps = os.open(
        folder / f"rank-{plan.rank}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    states = os.open(
        folder / f"rank-{plan.rank}.states", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    stop = folder / "stop"
    # The image, in containers of which the Compose tests train, has no torch.
    dataset_class: Any = tokenloom.RemoteDataset if find_spec("torch") else tokenloom.NumpyDataset
    dataset = dataset_class(
        plan.url,
        plan.batch_size,
        rank=plan.rank,
        world_size=plan.world_size,
        launch=LaunchOptions(attempt=plan.attempt, takeover=plan.takeover),
        resume=plan.resume or None,
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
        record["samples"] = np.asarray(batch["sample_ids"])
        record["sources"] = np.asarray(batch["source_ids"])
        record["ids"] = np.asarray(batch["input_ids"])
        os.write(steps, record.tobytes())
        if number % plan.checkpoint_every == 0:
            line = {"end": batch["sample_index"], "state": json.dumps(dataset.state_dict())}
            os.write(states, (json.dumps(line) + "\n").encode())
        if stop.exists() and batch["sample_index"] >= int(stop.read_text()):
            break
        if plan.pace_s:
            time.sleep(draw.expovariate(1 / plan.pace_s))
    dataset.close()
    _write_end(
        folder,
        plan.rank,
        {"error": None, "index": dataset.sample_index, "reason": dataset.end_reason},
    )


def _write_end(folder: Path, rank: int, end: dict[str, Any]) -> None:
    (folder / f"rank-{rank}.end.json").write_text(json.dumps(end), encoding="utf-8")


def main() -> None:
    """The plan, as JSON, is the only argument."""
    plan = RankPlan(**json.loads(sys.argv[1]))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", force=True
    )
    try:
        train(plan)
    except Exception as error:
        logging.exception("rank %d ends", plan.rank)
        _write_end(
            Path(plan.folder), plan.rank, {"error": type(error).__name__, "message": str(error)}
        )
        sys.exit(FAILED)

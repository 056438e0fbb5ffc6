"""What checks stand on: a server of small runs, each with what one check is about, and the order that they have."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.conformance.client import Broken, Client, Pool
from tests.conformance.reference import Sample, samples, snapshot
from tests.support.server_process import ServerProcess

CONTROL_TOKEN = "conformance-token-of-32-characters"
#: For what was taken to be committed.
COMMIT_S = 120.0
#: No run has so many samples but those that a check reads the beginning of.
_SAMPLES = 400

#: What is special about each run. All have two sources, so that ids of sources matter.
_RUNS: dict[str, dict[str, Any]] = {
    "narrow": {"vocab_size": 250, "sequence_length": 12},
    "shifted": {"vocab_size": 60_000, "sequence_length": 11, "labels": "shifted"},
    "large": {"vocab_size": 100_000, "sequence_length": 2**17},
    "masked": {
        "vocab_size": 250,
        "sequence_length": 33,
        "labels": "shifted",
        "packing": "best_fit",
        "mask_boundaries": True,
    },
    "left": {"vocab_size": 60_000, "sequence_length": 40, "packing": "none", "padding": "left"},
    "short": {"vocab_size": 250, "sequence_length": 50, "last_micro_step": "pad"},
}


class World:
    """The server and its runs, and how the client that is checked gets at them."""

    def __init__(self, folder: Path) -> None:
        self._clients: Pool | None = None
        self._attempts = count()
        rng = np.random.default_rng(5)
        for run, fields in _RUNS.items():
            for name in ("first", "second"):
                _write(folder / f"data/{run}/{name}.parquet", rng, fields["vocab_size"], run)
        self._mixtures = [_mixture(folder, run, fields) for run, fields in _RUNS.items()]
        self._folder = folder
        self._server = ServerProcess(folder / "server", *self._mixtures).start()
        self.samples = cache(self._read_samples)

    def close(self) -> None:
        self._server.kill()

    @contextmanager
    def with_client(self, command: str) -> Iterator[None]:
        """Checks are of the client that this command starts."""
        self._clients = Pool(command)
        try:
            yield
        finally:
            self._clients.close()

    def _read_samples(self, run: str) -> list[Sample]:
        return samples(self._server.grpc, run, 20 if run == "large" else _SAMPLES)

    def restart(self) -> None:
        """As a crash, and whoever starts it again."""
        self._server.kill()
        self._server.start()

    def snapshot(self, run: str, sample_index: int) -> str:
        """The server's state at a sample index."""
        return snapshot(self._server.grpc, run, sample_index)

    def wait_committed(self, run: str, sample_index: int) -> None:
        """Until the ledger has that."""
        until = time.monotonic() + COMMIT_S
        while (
            committed := json.loads(snapshot(self._server.grpc, run))["sample_index"]
        ) != sample_index:
            if time.monotonic() > until:
                raise Broken(
                    f"run {run!r}: sample {sample_index} was taken, but {committed} is committed: no Progress"
                )
            time.sleep(0.05)

    @contextmanager
    def guarded(self) -> Iterator[str]:
        """The address of a server that wants a token."""
        guarded = ServerProcess(
            self._folder / "guarded",
            self._mixtures[0],
            environment={"TOKENLOOM_TOKEN": CONTROL_TOKEN},
        )
        try:
            yield guarded.start().grpc
        finally:
            guarded.terminate()

    @contextmanager
    def ranks(self, number: int) -> Iterator[list[Client]]:
        """So many processes of the client, not joined."""
        assert self._clients is not None
        with self._clients.take(number) as taken:
            yield taken

    @contextmanager
    def join(
        self,
        run: str,
        *,
        ranks: int = 1,
        batch_size: int,
        state: str | None = None,
        resume: str | None = "fresh",
    ) -> Iterator[list[Client]]:
        """All ranks of a launch, at sample 0 unless something else is asked for."""
        attempt = f"attempt-{next(self._attempts)}"
        with self.ranks(ranks) as started:
            for rank, client in enumerate(started):
                self.ask_to_join(
                    client,
                    run,
                    rank=rank,
                    world_size=ranks,
                    batch_size=batch_size,
                    attempt=attempt,
                    state=state,
                    resume=None if state is not None else resume,
                )
            yield started

    def ask_to_join(self, client: Client, run: str, **fields: Any) -> dict[str, Any]:
        """A Join; what is not given is as of a launch of one rank from sample 0, which takes over."""
        asked = {
            "address": self._server.grpc,
            "rank": 0,
            "world_size": 1,
            "batch_size": 1,
            "state": None,
            "token": None,
        }
        asked |= {"attempt": f"attempt-{next(self._attempts)}", "takeover": True}
        resume = None if fields.get("state") is not None else "fresh"
        return client.ask("join", run=run, **asked | {"resume": resume} | fields)


def _write(path: Path, rng: np.random.Generator, vocab_size: int, run: str) -> None:
    """Rows of random ids, some of them empty."""
    rows, shortest, longest = {"large": (4, 300_000, 600_000), "short": (60, 0, 20)}.get(
        run, (300, 0, 40)
    )
    lengths = rng.integers(shortest, longest, rows)
    ids = [rng.integers(0, vocab_size, length, dtype=np.uint32) for length in lengths]
    masks = [rng.integers(0, 2, length, dtype=np.uint8) for length in lengths]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"ids": pa.array(ids), "mask": pa.array(masks)}), path)


def _mixture(folder: Path, run: str, fields: dict[str, Any]) -> Path:
    masked = {"loss_mask": "mask"} if run == "masked" else {}
    children = [
        {
            "source": f"parquet:data/{run}/{name}.parquet:ids",
            "alias": name,
            "weight": weight,
            **masked,
        }
        for name, weight in (("first", 2), ("second", 1))
    ]
    document = {"run": run, "seed": 3, "end_of_text_id": 1, **fields}
    document["mixture"] = {"policy": "least_consumed", "children": children}
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path

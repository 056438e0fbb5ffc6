"""What a trainer sees: ranks in lock-step, and a receipt of every sample that they got.

The receipt trusts nothing of the server's: what it says of samples, tokens and digests is recounted
from the tensors. Also a program: one rank in a process of its own (``run_trainer``).
"""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenloom import Batch, ConnectionOptions, LaunchOptions, RemoteDataset

from support.digest import digest_after
from support.forks import Forks

TRAINER_DEADLINE_S = 240


class Sample(NamedTuple):
    source: int
    ids: tuple[int, ...]


class Receipt:
    """The samples that came, by sample index; each once."""

    def __init__(self, samples: Mapping[int, Sample] | None = None) -> None:
        self.samples: dict[int, Sample] = dict(samples or {})

    def add(self, batch: Mapping[str, Any]) -> None:
        for index, source, ids in zip(
            batch["sample_ids"].tolist(),
            batch["source_ids"].tolist(),
            batch["input_ids"].tolist(),
            strict=True,
        ):
            if source == -1:
                continue
            assert index not in self.samples, f"sample {index} came twice"
            self.samples[index] = Sample(source, tuple(ids))

    def sequence(self, begin: int = 0) -> list[Sample]:
        """The samples from ``begin`` on, in order, without a gap."""
        assert sorted(self.samples) == list(range(begin, begin + len(self.samples))), (
            "samples are missing"
        )
        return [self.samples[index] for index in range(begin, begin + len(self.samples))]


def rolling_digest(samples: Sequence[Sample], id_type: str = "<u2", digest: str = "0") -> str:
    """The digest behind ``samples`` by the rule in the wire contract, from one before them."""
    value = int(digest, 16)
    for sample in samples:
        value = digest_after(value, sample.source, np.array(sample.ids, id_type).tobytes())
    return f"{value:032x}"


def with_connection(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a dataset, of which those of its connection go into ``connection`` and those of its launch into
    ``launch``; it waits for 30 s at most."""
    kept = dict(options)
    connection, launch = (
        {each.name: kept.pop(each.name) for each in fields(kind) if each.name in kept}
        for kind in (ConnectionOptions, LaunchOptions)
    )
    kept["connection"] = ConnectionOptions(**{"connect_timeout_s": 30.0} | connection)
    return kept | ({"launch": LaunchOptions(**launch)} if launch else {})


class World:
    """All ranks of one launch, in this process. ``step`` takes one batch on each."""

    def __init__(
        self,
        url: str,
        world_size: int = 1,
        batch_size: int = 1,
        *,
        state: Mapping[str, Any] | None = None,
        attempt: str | None = None,
        **options: Any,
    ) -> None:
        attempt = attempt or uuid.uuid4().hex
        self.receipt = Receipt()
        self.ranks = [
            RemoteDataset(
                url,
                batch_size,
                rank=rank,
                world_size=world_size,
                **with_connection({"attempt": attempt, **options}),
            )
            for rank in range(world_size)
        ]
        if state is not None:
            for rank in self.ranks:
                rank.load_state_dict(state)
        self._iterators: list[Iterator[Batch]] = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(self) -> World:
        """Rank 0 opens, the others agree."""
        if not self._iterators:
            self._iterators = [iter(rank) for rank in self.ranks]
        return self

    def step(self) -> list[Batch] | None:
        """One batch on each rank; None at the end of the data, which all must reach at once."""
        self.join()
        batches = [next(iterator, None) for iterator in self._iterators]
        if batches[0] is None:
            assert batches == [None] * len(batches), "one rank ended and another did not"
            return None
        for batch in batches:
            assert batch is not None, "one rank ended and another did not"
            self.receipt.add(batch)
        assert len({rank.sample_index for rank in self.ranks}) == 1, (
            "the ranks stand at different samples"
        )
        assert len({rank.digest for rank in self.ranks}) == 1, "the ranks have different digests"
        assert len({rank.total_tokens for rank in self.ranks}) == 1, (
            "the ranks count different tokens"
        )
        return [batch for batch in batches if batch is not None]

    def steps(self, count: int) -> World:
        for _ in range(count):
            assert self.step() is not None, "the data ended"
        return self

    def run(self) -> World:
        """To the end of the data."""
        while self.step() is not None:
            pass
        return self

    def state(self, at: int | None = None) -> dict[str, str]:
        """The state, which every rank must have to the byte."""
        states = [rank.state_dict(at) for rank in self.ranks]
        assert all(state == states[0] for state in states), "the ranks have different states"
        return states[0]

    @property
    def sample_index(self) -> int:
        return self.ranks[0].sample_index

    @property
    def digest(self) -> str:
        return self.ranks[0].digest

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


# A rank in a process of its own


@cache
def trainer_forks() -> Forks:
    """Where ranks come from: with torch and the client imported."""
    forks = Forks("torch.distributed", "support.trainer", options=("-W", "error"))
    atexit.register(forks.close)
    return forks


class Trainer:
    """A rank that runs by itself and writes each batch's samples to a file as it has them."""

    def __init__(
        self, folder: Path, name: str, environment: Mapping[str, str], **plan: Any
    ) -> None:
        self._lines = folder / f"{name}.jsonl"
        self._log = folder / f"{name}.log"
        arguments = json.dumps({**plan, "receipt": str(self._lines)})
        self._process = trainer_forks().fork(
            "support.trainer:_main", [arguments], output=self._log, environment=environment
        )

    def lines(self) -> list[dict[str, Any]]:
        """What it wrote until now."""
        text = self._lines.read_text(encoding="utf-8") if self._lines.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def receipt(self) -> Receipt:
        receipt = Receipt()
        for line in self.lines():
            for index, source, ids in line["samples"]:
                assert index not in receipt.samples, f"sample {index} came twice"
                receipt.samples[index] = Sample(source, tuple(ids))
        return receipt

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def running(self) -> bool:
        return self._process.poll() is None

    def go_on(self) -> None:
        """Behind ``pause_at``."""
        Path(f"{self._lines}.go").touch()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TRAINER_DEADLINE_S)

    def wait(self) -> int:
        try:
            return self._process.wait(TRAINER_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def _main() -> None:
    plan = json.loads(sys.argv[1])
    dataset = RemoteDataset(
        plan["url"], plan["batch_size"], **with_connection(plan.get("options", {}))
    )
    if plan.get("state"):
        dataset.load_state_dict(plan["state"])
    with Path(plan["receipt"]).open("w", encoding="utf-8") as receipt:
        for number, batch in enumerate(dataset, 1):
            samples = zip(
                batch["sample_ids"].tolist(),
                batch["source_ids"].tolist(),
                batch["input_ids"].tolist(),
                strict=True,
            )
            receipt.write(
                json.dumps({"samples": list(samples), "state": dataset.state_dict()}) + "\n"
            )
            receipt.flush()
            if number == plan.get("steps"):
                break
            if number == plan.get("pause_at"):
                while not Path(plan["receipt"] + ".go").exists():
                    time.sleep(0.02)
    dataset.close()

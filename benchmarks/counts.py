"""What counts by source cost between state boundaries: bytes and CPU of each micro-step, and a state, at 1,000 sources.

    python -m benchmarks.counts --sources 1000 --padded

Eight ranks of eight samples of 512 tokens: the server's part (making a group, and its messages to all
ranks), the client's (reading them, up to the points that states are written at), and ``state_dict()``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count, repeat
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenloom.connection.stream import read
from tokenloom.snapshot import Base, History, Point
from tokenloom_server.api.grpc.messages import encode_delivery
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.order import builder
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.generation import Delivery
from tokenloom_server.run.sizing import group_micro_steps, message_steps

RANKS, BATCH, LENGTH, GROUPS = 8, 8, 512, 12
T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and its CPU time in microseconds."""
    began = time.thread_time()
    value = call()
    return value, (time.thread_time() - began) * 1e6


def timeline_of(folder: Path, sources: int, *, padded: bool) -> Timeline:
    """A run of so many small files of ids; ``padded``: each of their documents is a sample."""
    ids = np.random.default_rng(0).integers(1, 50_000, 40_000).astype(np.uint16)
    ids[np.arange(299, len(ids), 300)] = 0
    for source in range(sources):
        np.save(folder / f"{source}.npy", ids)
    document = {
        "run": "counts",
        "vocab_size": 50_001,
        "end_of_text_id": 0,
        "sequence_length": LENGTH,
        **({"packing": "none", "pad_id": 0} if padded else {}),
        "mixture": {
            "policy": "weighted",
            "children": [
                {"source": f"npy:{source}.npy", "epochs": "inf"} for source in range(sources)
            ],
        },
    }
    parsed = config.parse(document, where="counts", catalog=open_catalog())
    return Timeline(builder.create(parsed, folder, folder / "index"))


def received(group: StepGroup, steps: int, rank: int, base: Base) -> tuple[int, float, list[Point]]:
    """Bytes of a rank's messages, the client's CPU time for them, and its points."""
    size, spent, points = 0, 0.0, list[Point]()
    for first in range(0, len(group.marks), steps):
        delivery = Delivery(group, first, min(first + steps, len(group.marks)), first == 0)
        data = encode_delivery(rank, delivery, 0, 1, document_starts=False)
        size += len(data)

        def take(data: bytes = data) -> list[Point]:
            delivered = read(data).delivered
            assert delivered is not None
            numbers = (
                delivered.end_indices,
                delivered.total_tokens,
                delivered.real_tokens,
                delivered.digests,
            )
            return list(
                map(
                    Point,
                    *numbers,
                    repeat(base),
                    zip(repeat(delivered.counts), count(1), strict=False),
                )
            )

        more, taken = timed(take)
        spent += taken
        points += more
    return size, spent, points


def main() -> None:
    """Prints medians by micro-step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--padded", action="store_true")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {
        name: [] for name in ("group", "messages", "bytes", "client", "state_dict")
    }
    with tempfile.TemporaryDirectory() as folder:
        timeline = timeline_of(Path(folder), options.sources, padded=options.padded)
        sample_bytes = timeline.sample_bytes
        steps = group_micro_steps(sample_bytes, RANKS, BATCH, options.sources)
        pipeline = timeline.pipeline(timeline.initial())
        template = json.dumps(timeline.first.record.template("0" * 32, "train", 1)).encode()
        for _ in range(GROUPS):
            plan = BatchPlan(
                start_index=pipeline.sample_index,
                world_size=RANKS,
                batch_size=BATCH,
                group_micro_steps=steps,
            )
            group = pipeline.begin_group(plan)
            group.resume_state = timeline.encode(group.base)
            base = Base(group.begin, group.resume_state.encode())
            _, made = timed(lambda group=group: pipeline.fill(group, steps))  # type: ignore[misc]
            ranks, sent = timed(
                lambda group=group, base=base: [  # type: ignore[misc]
                    received(group, message_steps(sample_bytes, BATCH), rank, base)
                    for rank in range(RANKS)
                ]
            )
            history = History(template, ranks[0][2][-1], None)
            _, written = timed(history.text)
            client = sum(spent for _, spent, _ in ranks)
            figures["group"].append(made / steps)
            figures["messages"].append((sent - client) / steps)
            figures["bytes"].append(
                (sum(size for size, _, _ in ranks) / RANKS - len(base.resume_state)) / steps
                - BATCH * sample_bytes
            )
            figures["client"].append(client / RANKS / steps)
            figures["state_dict"].append(written)
    rest = {name: round(statistics.median(values[2:]), 1) for name, values in figures.items()}
    print(
        json.dumps(
            {"sources": options.sources, "padded": options.padded, "micro_steps": steps} | rest
        )
    )


if __name__ == "__main__":
    main()

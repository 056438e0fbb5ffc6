"""A rank of a trainer that only takes batches: the client under measure, a process of its own.

    python -m benchmarks.trainer --url grpc://127.0.0.1:50051/run --rank 0 --world-size 2 --attempt a --board FILE

It runs until SIGTERM and then writes its waits in ``next()``. With ``--pace`` it takes a step only when one is due,
as a trainer that computes does.
"""

from __future__ import annotations

import argparse
import signal
import time
from array import array
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from tokenloom import LaunchOptions, RemoteDataset

#: A wait of so long makes the trainer late.
LATE_S = 0.001


class _Ended(BaseException):
    """SIGTERM came."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


def take(
    dataset: RemoteDataset, cells: np.memmap, pace: float, asked: array[float], waited: array[float]
) -> None:
    """Takes batches until the data end. ``cells``: this rank's on the board; ``pace`` in tokens/s, 0 for none.

    ``asked`` gets the monotonic time at which each step was asked for, ``waited`` how long it took, seconds.
    """
    clock, tokens, steps = time.monotonic, 0, 0
    due_s = clock()
    batches = iter(dataset)
    while True:
        if pace:
            time.sleep(max(0.0, due_s - clock()))
        began = clock()
        try:
            batch = next(batches)
        except StopIteration:
            return
        ended = clock()
        asked.append(began)
        waited.append(ended - began)
        count = batch["input_ids"].numel()
        tokens += count
        steps += 1
        cells[0], cells[1] = tokens, steps
        if pace:
            # A step that the trainer waited for is not caught up with; what sleep() oversleeps is.
            due_s = (ended if ended - began > LATE_S else due_s) + count / pace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="grpc://host:port/run")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--attempt", required=True, help="one id for all ranks of the launch")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per step (default 8)")
    parser.add_argument(
        "--pace", type=float, default=0.0, help="tokens per second to take; 0 (default): all"
    )
    parser.add_argument(
        "--board", type=Path, required=True, help="file of int64 [ranks, 3]: tokens, steps, ended"
    )
    parser.add_argument(
        "--waits", type=Path, required=True, help="where to write the waits on SIGTERM (.npy)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = np.memmap(options.board, np.int64, "r+").reshape(-1, 3)[options.rank]
    asked, waited = array("d"), array("d")
    signal.signal(signal.SIGTERM, _end)
    try:
        dataset = RemoteDataset(
            options.url,
            options.batch_size,
            rank=options.rank,
            world_size=options.world_size,
            launch=LaunchOptions(attempt=options.attempt),
        )
        take(dataset, cells, options.pace, asked, waited)
        cells[2] = 1
        # Whoever measures ends us: until then, this process must not be missing.
        while True:
            signal.pause()
    except _Ended:
        np.save(options.waits, np.array([asked[: len(waited)], waited]))


if __name__ == "__main__":
    main()

"""Many ranks in one process, each as light as a client can be: it takes messages, and says how far it is.

    python -m benchmarks.crowd --url grpc://127.0.0.1:50051/run --ranks 0:32 --world-size 64 --board FILE

No tensors, no torch: what is measured with a crowd is the server. Writes tokens, steps and its end to the board,
one line for the whole crowd; on SIGTERM, the gaps between the messages of each rank.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import uuid
from array import array
from pathlib import Path

import numpy as np
from grpc import aio
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

#: Groups that a rank holds: as many as the real client.
CREDIT_GROUPS = 2
#: Ranks that share a connection. HTTP/2 allows about a hundred streams on one; real ranks have one each.
RANKS_PER_CHANNEL = 16
JOIN_TIMEOUT_S = 120.0
#: How often the board learns where the slowest rank is.
NOTE_EVERY_S = 0.02


class Crowd:
    """The ranks [first, last) of a run."""

    def __init__(
        self, url: str, world_size: int, attempt: str, batch_size: int, cells: np.memmap
    ) -> None:
        """``cells``: the crowd's line on the board."""
        address, _, self.run_name = url.removeprefix("grpc://").partition("/")
        self.address = address
        self.world_size = world_size
        self.attempt = attempt
        self.batch_size = batch_size
        self.cells = cells
        self.tokens = 0
        self.steps: dict[int, int] = {}
        self._noted_at = 0.0
        #: (monotonic time, seconds since the rank's message before).
        self.came, self.gaps = array("d"), array("d")

    async def take(self, first: int, last: int) -> None:
        """Joins all ranks and takes their messages until the data end."""
        self.steps = dict.fromkeys(range(first, last), 0)
        channels = [self._channel() for _ in range(-(-(last - first) // RANKS_PER_CHANNEL))]
        try:
            await asyncio.gather(
                *(
                    self._rank(rank, DataLoaderStub(channels[number // RANKS_PER_CHANNEL]))
                    for number, rank in enumerate(range(first, last))
                )
            )
        finally:
            for channel in channels:
                await channel.close()
        self.cells[2] = 1

    def _channel(self) -> aio.Channel:
        # A pool of its own: else gRPC puts all channels to one address on one connection.
        own = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        return aio.insecure_channel(self.address, options=own)

    async def _rank(self, rank: int, stub: DataLoaderStub) -> None:
        nonce = uuid.uuid4().hex
        request = wire.JoinRequest(
            run=self.run_name,
            rank=rank,
            world_size=self.world_size,
            batch_size=self.batch_size,
            attempt=self.attempt,
            nonce=nonce,
        )
        joined = await stub.Join(request, timeout=JOIN_TIMEOUT_S, wait_for_ready=True)
        credit = max(CREDIT_GROUPS * joined.group_micro_steps, 4)
        step_tokens = self.batch_size * joined.sequence_length
        call = stub.Stream()
        await call.write(
            wire.StreamRequest(
                open=wire.StreamOpen(
                    run=self.run_name,
                    run_uid=joined.run_uid,
                    generation=joined.generation,
                    rank=rank,
                    nonce=nonce,
                    received_through=joined.start_index,
                    progress=wire.Progress(
                        consumed_through=joined.start_index, credit_micro_steps=credit
                    ),
                )
            )
        )
        before = time.monotonic()
        while True:
            message = await call.read()
            if message is aio.EOF or message.HasField("end_of_data"):
                return
            if not message.HasField("batches"):
                continue
            now = time.monotonic()
            self.came.append(now)
            self.gaps.append(now - before)
            before = now
            steps = message.batches.micro_steps
            self.tokens += len(steps) * step_tokens
            self.steps[rank] += len(steps)
            self.cells[0] = self.tokens
            if now > self._noted_at + NOTE_EVERY_S:
                self._noted_at = now
                self.cells[1] = min(self.steps.values())
            progress = wire.Progress(
                consumed_through=steps[-1].end_index, credit_micro_steps=credit
            )
            await call.write(wire.StreamRequest(progress=progress))


async def _until_sigterm(crowd: Crowd, first: int, last: int, gaps: Path) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    taking = asyncio.create_task(crowd.take(first, last))
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait((taking, waiting), return_when=asyncio.FIRST_COMPLETED)
    if taking.done():
        taking.result()  # raises what a rank met
    await waiting
    np.save(gaps, np.array([crowd.came, crowd.gaps]))
    # Saying goodbye for hundreds of streams takes gRPC seconds, and nobody measures it.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="grpc://host:port/run")
    parser.add_argument("--ranks", required=True, metavar="FIRST:LAST", help="half-open")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument(
        "--attempt", default="bench", help="one id for all ranks of the launch (default bench)"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="samples per step (default 8)")
    parser.add_argument(
        "--board", type=Path, required=True, help="file of int64 [crowds, 3]: tokens, steps, ended"
    )
    parser.add_argument(
        "--line", type=int, default=0, help="the crowd's line on the board (default 0)"
    )
    parser.add_argument(
        "--gaps", type=Path, required=True, help="where to write the gaps on SIGTERM (.npy)"
    )
    options = parser.parse_args()
    first, last = map(int, options.ranks.split(":"))
    cells = np.memmap(options.board, np.int64, "r+").reshape(-1, 3)[options.line]
    crowd = Crowd(options.url, options.world_size, options.attempt, options.batch_size, cells)
    asyncio.run(_until_sigterm(crowd, first, last, options.gaps))


if __name__ == "__main__":
    main()

"""A range of a run's samples, however long, from one server or another: what an export reads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_server.errors import BeyondHorizon, ConfigError, OrderMismatch

from tokenloom_tools.peek.samples import PeekedSample
from tokenloom_tools.peek.servers import Servers
from tokenloom_tools.peek.stream import PeekStream

#: How long a reader looks for a server that answers, seconds, and the pause between two attempts.
SEARCH_S, _PAUSE_S = 60.0, 0.5
#: As many samples as one stream is asked for.
_MOST_SAMPLES = 2**31 - 1


class SampleRange:
    """The samples [``begin``, ``end``) of a run."""

    def __init__(
        self, servers: Servers, begin: int, end: int | None, *, clock: Callable[[], float]
    ) -> None:
        """``end``: None for where the ledger stands. Nothing is asked before the first sample is."""
        self._servers = servers
        self._clock = clock
        #: The next sample.
        self.index = self.begin = begin
        self.end = end
        self._joined: wire.JoinResponse | None = None
        self._digest = ""

    @property
    def joined(self) -> wire.JoinResponse:
        """Of which run it is, and where it begins there. Known from the first sample on."""
        assert self._joined is not None
        return self._joined

    def samples(self) -> Iterator[PeekedSample]:
        """Where a server goes away, the next one goes on; for ``SEARCH_S`` none need answer.

        Raises ``ServerUnreachable``, ``BeyondHorizon`` where the data end before, and what the server answers.
        """
        targets = itertools.cycle(self._servers.targets)
        answered_at = self._clock()
        while self.end is None or self.index < self.end:
            before = self.index
            try:
                with self._servers.channel(next(targets)) as channel:
                    reason = yield from self._from(DataLoaderStub(channel))
            except grpc.RpcError as error:
                answered_at = self._clock() if self.index > before else answered_at
                if (
                    error.code() is not grpc.StatusCode.UNAVAILABLE
                    or self._clock() - answered_at > SEARCH_S
                ):
                    raise self._servers.failure(error) from None
                time.sleep(_PAUSE_S)
                continue
            if reason is not None and self.index == before:
                raise BeyondHorizon(
                    f"sample {self.index} does not exist: {reason}; ask for samples up to {self.index}"
                )

    def _from(self, stub: DataLoaderStub) -> Generator[PeekedSample, None, str | None]:
        """The samples of one stream, and why the data ended there if they did."""
        stream = PeekStream(stub, self._servers, self.index)
        self._begin(stream.joined)
        count = _MOST_SAMPLES if self.end is None else min(self.end - self.index, _MOST_SAMPLES)
        last = stream.joined.start_index + count
        with closing(stream.samples(count)) as samples:
            for sample in samples:
                if self.end is None:
                    self.end = stream.committed
                if self.index < self.end:
                    self.index, self._digest = sample.index + 1, sample.digest
                    yield sample
                if self.index >= min(self.end, last):
                    return None
        if self.end is None:
            self.end = stream.committed
        return stream.end

    def _begin(self, joined: wire.JoinResponse) -> None:
        """Refuses what no list of ids can hold, and a server of other data than the one before."""
        if joined.global_batch_size:
            raise ConfigError(
                f"run {self._servers.run!r} gives batches of rows (batching), which are tensors and no ids: its files "
                "are what there is to export"
            )
        if joined.loss_masks:
            raise ConfigError(
                f"run {self._servers.run!r} has loss masks (loss_mask), which neither Megatron-LM's files nor a list "
                "of ids takes: an export would lose them"
            )
        if self._digest and joined.start_digest != self._digest:
            raise OrderMismatch(
                f"sample {self.index} has digest {joined.start_digest} at the server that answers now, but the samples "
                f"before have {self._digest}: its data, tokeniser or software are others; begin again"
            )
        if self._joined is None:
            self._joined = joined

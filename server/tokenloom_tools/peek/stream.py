"""A peek at a run over gRPC: the Join, and the stream of the samples that follow; and what ``tokenloom peek`` shows."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.resume import NamedSource, sources_of
from tokenloom_proto.versions import own_release

from tokenloom_tools.peek.samples import PeekedSample, decode_batches
from tokenloom_tools.peek.servers import Servers
from tokenloom_tools.text import Decode, bytes_decoder, load_decoder

#: The server may have to go forward to the first sample, for as long as a client's Join waits, seconds.
DEADLINE_S = 300.0


class PeekStream:
    """The samples of a run from an index on, as one server has them."""

    def __init__(self, stub: DataLoaderStub, servers: Servers, index: int | None) -> None:
        """Joins at a sample index, or where the ledger stands (None). Raises ``grpc.RpcError``."""
        self._stub = stub
        self._servers = servers
        resume = "" if index is None else str(index)
        request = wire.JoinRequest(
            run=servers.run,
            peek=True,
            world_size=1,
            batch_size=1,
            resume=resume,
            release=own_release(),
        )
        self.joined: wire.JoinResponse = stub.Join(
            request, timeout=DEADLINE_S, metadata=servers.metadata
        )
        #: Samples in the ledger, as the newest message says.
        self.committed = 0
        #: Why the data ended; None while they have not.
        self.end: str | None = None

    def samples(
        self, count: int, timeout_s: float | None = None
    ) -> Generator[PeekedSample, None, None]:
        """At least ``count`` samples from the Join on, unless the data end. To be closed by whoever needs no more.

        Raises ``grpc.RpcError``.
        """
        sources = {
            source.id: NamedSource(source.spec, source.alias) for source in self.joined.sources
        }
        closed = threading.Event()
        try:
            requests = self._requests(count, closed, timeout_s)
            for response in self._stub.Stream(
                requests, timeout=timeout_s, metadata=self._servers.metadata
            ):
                self.committed = response.committed_through
                if response.WhichOneof("kind") == "end_of_data":
                    self.end = response.end_of_data.reason
                    return
                if response.batches.HasField("base"):
                    # A revision may have brought more since the Join.
                    sources |= sources_of(response.batches.base.resume_state)
                yield from decode_batches(self.joined, sources, response.batches)
        finally:
            closed.set()

    def _requests(
        self, count: int, closed: threading.Event, timeout_s: float | None
    ) -> Iterator[wire.StreamRequest]:
        start, rows = self.joined.start_index, self.joined.global_batch_size
        # Of batches one more: the sample that was asked for may lie within the first.
        steps = count // rows + 2 if rows else count
        yield wire.StreamRequest(
            open=wire.StreamOpen(
                run=self._servers.run,
                run_uid=self.joined.run_uid,
                received_through=start,
                progress=wire.Progress(consumed_through=start, credit_micro_steps=steps),
                document_starts=True,
                peek=True,
                batch_size=1,
            )
        )
        # The stream ends once the client's side is closed.
        closed.wait(timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekView:
    """Consecutive samples of a run."""

    run: str
    #: Samples in the ledger: those before this index count, those from it on do not yet.
    committed: int
    samples: Sequence[PeekedSample]
    #: Why there are fewer than were asked for.
    end: str | None
    #: None where the run has no tokeniser.
    decode: Decode | None


def peek(servers: Servers, index: int | None, count: int) -> PeekView:
    """The ``count`` samples from ``index`` on; None: from where the ledger stands.

    Raises ``ServerUnreachable``, and what the server answers.
    """
    for target in servers.targets:
        try:
            with servers.channel(target) as channel:
                return _peek(DataLoaderStub(channel), servers, index, count)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or target == servers.targets[-1]:
                raise servers.failure(error) from None
    raise AssertionError("unreachable: there is at least one address")


def _peek(stub: DataLoaderStub, servers: Servers, index: int | None, count: int) -> PeekView:
    stream = PeekStream(stub, servers, index)
    with closing(stream.samples(count, DEADLINE_S)) as following:
        # Of a batch of rows the first may lie before the index.
        samples = list(
            islice((sample for sample in following if sample.index >= (index or 0)), count)
        )
    return PeekView(
        run=servers.run,
        committed=stream.committed,
        samples=samples,
        end=stream.end,
        decode=_decoder(stub, servers),
    )


def _decoder(stub: DataLoaderStub, servers: Servers) -> Decode | None:
    request = wire.TokenizerRequest(run=servers.run)
    answer = stub.Tokenizer(request, timeout=DEADLINE_S, metadata=servers.metadata)
    if answer.is_bytes:
        return bytes_decoder()
    return load_decoder(answer.tokenizer_json.decode()) if answer.tokenizer_json else None

"""A peek at a run over gRPC: the Join, and the stream of what follows."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.resume import NamedSource, sources_of

from tokenloom_server.tools.peek.servers import Servers

#: The server may have to go forward to the first sample, for as long as a client's Join waits, seconds.
DEADLINE_S = 300.0


def join(stub: DataLoaderStub, servers: Servers, index: int | None) -> wire.JoinResponse:
    """Where a peek begins: at a sample index, or where the ledger stands (None)."""
    resume = "" if index is None else str(index)
    request = wire.JoinRequest(run=servers.run, peek=True, world_size=1, batch_size=1, resume=resume)
    joined: wire.JoinResponse = stub.Join(request, timeout=DEADLINE_S, metadata=servers.metadata)
    return joined


def read(
    stub: DataLoaderStub,
    servers: Servers,
    joined: wire.JoinResponse,
    count: int,
    timeout_s: float | None = None,
) -> Generator[tuple[wire.StreamResponse, dict[int, NamedSource]], None, None]:
    """The responses with ``count`` samples from the Join on, each with all sources so far, by number.

    To be closed by whoever needs no more of it.
    """
    sources = {source.id: NamedSource(source.spec, source.alias) for source in joined.sources}
    closed = threading.Event()
    try:
        requests = _requests(servers.run, joined, count, closed, timeout_s)
        for response in stub.Stream(requests, timeout=timeout_s, metadata=servers.metadata):
            if response.batches.HasField("base"):
                # A revision may have brought more since the Join.
                sources |= sources_of(response.batches.base.resume_state)
            yield response, sources
    finally:
        closed.set()


def _requests(
    run: str, joined: wire.JoinResponse, count: int, closed: threading.Event, timeout_s: float | None
) -> Iterator[wire.StreamRequest]:
    start = joined.start_index
    # Of batches one more: the sample that was asked for may lie within the first.
    steps = count if not joined.global_batch_size else count // joined.global_batch_size + 2
    yield wire.StreamRequest(
        open=wire.StreamOpen(
            run=run,
            run_uid=joined.run_uid,
            received_through=start,
            progress=wire.Progress(consumed_through=start, credit_micro_steps=steps),
            document_starts=True,
            peek=True,
            batch_size=1,
        )
    )
    # The stream ends once the client's side is closed.
    closed.wait(timeout_s)

"""A few consecutive samples of a run: what ``tokenloom peek`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

from tokenloom_server.tokenizer.text import Decode, bytes_decoder, load_decoder
from tokenloom_server.tools.peek.samples import PeekedSample
from tokenloom_server.tools.peek.servers import Servers
from tokenloom_server.tools.peek.stream import DEADLINE_S, PeekStream


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
        samples = list(islice((sample for sample in following if sample.index >= (index or 0)), count))
    return PeekView(
        run=servers.run, committed=stream.committed, samples=samples, end=stream.end, decode=_decoder(stub, servers)
    )


def _decoder(stub: DataLoaderStub, servers: Servers) -> Decode | None:
    request = wire.TokenizerRequest(run=servers.run)
    answer = stub.Tokenizer(request, timeout=DEADLINE_S, metadata=servers.metadata)
    if answer.is_bytes:
        return bytes_decoder()
    return load_decoder(answer.tokenizer_json.decode()) if answer.tokenizer_json else None

"""Samples of a run, as its server gives them to who only looks: what `tokenloom peek` shows.

The server package's own small gRPC client: it needs no torch, and so works in the server's image, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
import numpy as np
import numpy.typing as npt
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

from tokenloom_server import errors
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.remote import ServerUnreachable
from tokenloom_server.tokenizer.text import Decode, bytes_decoder, load_decoder

#: The server may have to go forward to the first sample, for as long as a client's Join waits, seconds.
_DEADLINE_S = 300.0
_OPTIONS = [
    # A proxy of the environment is for the outside world, not for the cluster.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One sample: its place in the order, its tokens, and how many documents have some of them."""

    index: int
    source: str
    spec: str
    ids: npt.NDArray[np.integer[Any]]
    documents: int
    #: The rolling digest behind it.
    digest: str

    def text(self, decode: Decode | None, most: int | None = None) -> str:
        """Its text, of the first ``most`` tokens if given; its ids where the run has no tokeniser."""
        ids = self.ids[:most].tolist()
        return decode(ids) if decode is not None else " ".join(map(str, ids))

    def document(self, decode: Decode | None) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "sample": self.index,
            "source": self.source,
            "spec": self.spec,
            "tokens": len(self.ids),
            "documents": self.documents,
            "digest": self.digest,
            "ids": self.ids.tolist(),
            "text": decode(self.ids.tolist()) if decode is not None else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Consecutive samples of a run."""

    run: str
    #: Samples in the ledger: those before this index count, those from it on do not yet.
    committed: int
    samples: Sequence[Seen]
    #: Why there are fewer than were asked for.
    end: str | None
    #: None where the run has no tokeniser.
    decode: Decode | None


def look(url: str, at: int | None, count: int) -> View:
    """The ``count`` samples from ``at`` on; None: from where the ledger stands.

    Raises ``ConfigError`` for another URL than ``grpc://host:port/run`` (several addresses with commas between),
    ``ServerUnreachable``, and what the server answers.
    """
    targets, run = _parse(url)
    for target in targets:
        try:
            with grpc.insecure_channel(target, options=_OPTIONS) as channel:
                return _look(DataLoaderStub(channel), run, at, count)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or target == targets[-1]:
                raise _failure(url, error) from None
    raise AssertionError("unreachable: there is at least one address")


def _look(stub: DataLoaderStub, run: str, at: int | None, count: int) -> View:
    resume = "" if at is None else str(at)
    request = wire.JoinRequest(run=run, peek=True, world_size=1, batch_size=1, resume=resume)
    joined = stub.Join(request, timeout=_DEADLINE_S)
    samples: list[Seen] = []
    committed, end = 0, None
    seen_all = threading.Event()
    try:
        for response in stub.Stream(_requests(run, joined, count, seen_all), timeout=_DEADLINE_S):
            committed = response.committed_through
            if response.WhichOneof("kind") == "end_of_data":
                end = response.end_of_data.reason
                break
            samples += _samples(joined, response.batches)
            if len(samples) >= count:
                break
    finally:
        seen_all.set()
    return View(run=run, committed=committed, samples=samples, end=end, decode=_decoder(stub, run))


def _requests(
    run: str, joined: wire.JoinResponse, count: int, seen_all: threading.Event
) -> Iterator[wire.StreamRequest]:
    start = joined.start_index
    yield wire.StreamRequest(
        open=wire.StreamOpen(
            run=run,
            run_uid=joined.run_uid,
            received_through=start,
            progress=wire.Progress(consumed_through=start, credit_steps=count),
            document_starts=True,
            peek=True,
            batch_size=1,
        )
    )
    # A side that is closed is a stream that ends.
    seen_all.wait(_DEADLINE_S)


def _samples(joined: wire.JoinResponse, batches: wire.Batches) -> Iterator[Seen]:
    """The samples of a message: its steps are of one sample each."""
    length = joined.sequence_length
    width = length + (joined.labels == wire.LABELS_SHIFTED)
    ids = np.frombuffer(batches.ids, np.dtype(f"<u{int(joined.id_type)}")).reshape(len(batches.steps), width)
    first = 0
    for step, row, source, begin in zip(batches.steps, ids, batches.source_ids, batches.document_counts, strict=True):
        starts = batches.document_starts[first : first + begin]
        first += begin
        inside = sum(start < length for start in starts)
        yield Seen(
            index=step.end_index - 1,
            source=joined.sources[source].alias,
            spec=joined.sources[source].spec,
            ids=row[:length],
            # What goes on from the sample before is a document of this one, too.
            documents=inside + (0 not in starts),
            digest=step.digest,
        )


def _decoder(stub: DataLoaderStub, run: str) -> Decode | None:
    found = stub.Tokenizer(wire.TokenizerRequest(run=run), timeout=_DEADLINE_S)
    if found.is_bytes:
        return bytes_decoder()
    return load_decoder(found.tokenizer_json.decode()) if found.tokenizer_json else None


def _parse(url: str) -> tuple[list[str], str]:
    scheme, _, rest = url.partition("://")
    netloc, _, path = rest.partition("/")
    targets, run = netloc.split(","), unquote(path)
    if scheme != "grpc" or not run or set(run) & set("/?#") or not all(map(_is_target, targets)):
        raise ConfigError(
            f"{url!r}: expected what trainers use, grpc://HOST:PORT/RUN, such as grpc://127.0.0.1:50051/wiki-and-code"
        )
    return targets, run


def _is_target(target: str) -> bool:
    host, _, port = target.rpartition(":")
    return bool(host) and port.isdecimal()


def _failure(url: str, error: grpc.RpcError) -> TokenloomError:
    """The server's own error, by its name; else that nothing answers."""
    details = error.details() or error.code().name
    name = next((str(entry.value) for entry in error.trailing_metadata() or () if entry.key == "tokenloom-error"), "")
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, TokenloomError):
        return known(details)
    return ServerUnreachable(
        f"{url}: no answer ({error.code().name}: {details}); give the gRPC address that `tokenloom serve` printed, and "
        "the run's name"
    )

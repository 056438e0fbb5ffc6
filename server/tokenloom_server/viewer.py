"""Samples of a run, as its server gives them to who only looks: what `tokenloom peek` shows.

The server package's own small gRPC client: it needs no torch, and so works in the server's image, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import numpy as np
import numpy.typing as npt
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.credentials import Credentials
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.resume import NamedSource, sources_of

from tokenloom_server import errors
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.remote import ServerUnreachable, token_to_look
from tokenloom_server.tokenizer.text import Decode, bytes_decoder, load_decoder

#: The server may have to go forward to the first sample, for as long as a client's Join waits, seconds.
_DEADLINE_S = 300.0
_Metadata = tuple[tuple[str, str], ...]
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


def look(
    url: str,
    at: int | None,
    count: int,
    environment: Mapping[str, str],
    *,
    token_file: Path | None = None,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> View:
    """The ``count`` samples from ``at`` on; None: from where the ledger stands.

    Token and files of TLS are those given, else the environment's (see ``Credentials``). Raises ``ConfigError`` for
    another URL than ``grpc://host:port/run`` or ``grpcs://…`` (several addresses with commas between) and where the
    token would travel unencrypted to another machine, ``ServerUnreachable``, and what the server answers.
    """
    targets, run, tls = _parse(url)
    try:
        credentials = Credentials.find(
            [target.rpartition(":")[0] for target in targets],
            tls=tls,
            token=token_to_look(environment, token_file),
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            environment=environment,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for target in targets:
        try:
            with _channel(target, credentials) as channel:
                return _look(DataLoaderStub(channel), credentials.metadata, run, at, count)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or target == targets[-1]:
                raise _failure(url, error) from None
    raise AssertionError("unreachable: there is at least one address")


def _channel(target: str, credentials: Credentials) -> grpc.Channel:
    if not credentials.tls:
        return grpc.insecure_channel(target, options=_OPTIONS)
    tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
    return grpc.secure_channel(target, tls, options=_OPTIONS)


def _look(stub: DataLoaderStub, metadata: _Metadata, run: str, at: int | None, count: int) -> View:
    resume = "" if at is None else str(at)
    request = wire.JoinRequest(run=run, peek=True, world_size=1, batch_size=1, resume=resume)
    joined = stub.Join(request, timeout=_DEADLINE_S, metadata=metadata)
    samples: list[Seen] = []
    sources = {source.id: NamedSource(source.spec, source.alias) for source in joined.sources}
    committed, end = 0, None
    seen_all = threading.Event()
    try:
        requests = _requests(run, joined, count, seen_all)
        for response in stub.Stream(requests, timeout=_DEADLINE_S, metadata=metadata):
            committed = response.committed_through
            if response.WhichOneof("kind") == "end_of_data":
                end = response.end_of_data.reason
                break
            if response.batches.HasField("base"):
                # A revision may have brought more since the Join.
                sources |= sources_of(response.batches.base.resume_state)
            samples += _samples(joined, sources, response.batches)
            if len(samples) >= count:
                break
    finally:
        seen_all.set()
    return View(run=run, committed=committed, samples=samples, end=end, decode=_decoder(stub, metadata, run))


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


def _samples(joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches) -> Iterator[Seen]:
    """The samples of a message: its steps are of one sample each."""
    length = joined.sequence_length
    form = SampleFormat(
        length=length,
        width=length + (joined.labels == wire.LABELS_SHIFTED),
        dtype=np.dtype(f"u{int(joined.id_type)}"),
        lengths=joined.sample_lengths,
        masked=joined.loss_masks,
        padding="left" if joined.pads_left else "right",
    )
    size, first = form.sample_bytes, 0
    samples = [batches.ids[at : at + size] for at in range(0, len(batches.ids), size)]
    for step, sample, source, count in zip(
        batches.steps, samples, batches.source_ids, batches.document_counts, strict=True
    ):
        starts = batches.document_starts[first : first + count]
        first += count
        ids = form.ids(sample)
        inside = sum(start < length for start in starts)
        yield Seen(
            index=step.end_index - 1,
            source=sources[source].alias,
            spec=sources[source].spec,
            # Of a sample that is full, the last id may be only a label.
            ids=ids[: length - form.begin(len(ids))],
            # What goes on from the sample before is a document of this one, too.
            documents=inside + (form.begin(len(ids)) not in starts),
            digest=step.digest,
        )


def _decoder(stub: DataLoaderStub, metadata: _Metadata, run: str) -> Decode | None:
    found = stub.Tokenizer(wire.TokenizerRequest(run=run), timeout=_DEADLINE_S, metadata=metadata)
    if found.is_bytes:
        return bytes_decoder()
    return load_decoder(found.tokenizer_json.decode()) if found.tokenizer_json else None


def _parse(url: str) -> tuple[list[str], str, bool]:
    """(targets, run, whether with TLS)"""
    scheme, _, rest = url.partition("://")
    netloc, _, path = rest.partition("/")
    targets, run = netloc.split(","), unquote(path)
    if scheme not in ("grpc", "grpcs") or not run or set(run) & set("/?#") or not all(map(_is_target, targets)):
        raise ConfigError(
            f"{url!r}: expected what trainers use, grpc://HOST:PORT/RUN, such as grpc://127.0.0.1:50051/wiki-and-code"
        )
    return targets, run, scheme == "grpcs"


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

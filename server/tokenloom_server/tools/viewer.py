"""Samples of a run, as its server gives them to who only looks: what `tokenloom peek` shows.

The server package's own small gRPC client: it needs no torch, and so works in the server's image, too.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
from tokenloom_server.packing.base import Batch, Feature
from tokenloom_server.packing.buckets import described, size_of
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.tokenizer.text import Decode, bytes_decoder, load_decoder
from tokenloom_server.tools.remote import ServerUnreachable, token_to_look

#: The server may have to go forward to the first sample, for as long as a client's Join waits, seconds.
_DEADLINE_S = 300.0
#: For so long whoever follows a run looks for a server that answers, seconds, with a pause between two attempts.
PATIENCE_S, _PAUSE_S = 60.0, 0.5
#: As many samples as one stream is asked for.
_MANY = 2**31 - 1
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
    #: The rolling digest behind it; of a batch of rows behind its last one.
    digest: str
    #: Total tokens of the run behind it.
    total_tokens: int
    #: Its ids as a model reads them, without padding: where labels are the next ids, one more.
    read: npt.NDArray[np.integer[Any]]
    #: Where documents begin among these, ascending; not where it goes on with one from the sample before.
    starts: tuple[int, ...]
    #: Of a row that travels as it is, its columns, for people.
    row: Mapping[str, Any] | None = None

    @property
    def tokens(self) -> int:
        """What it counts as, without padding: a row is one."""
        return len(self.ids) if self.row is None else 1

    def text(self, decode: Decode | None, most: int | None = None) -> str:
        """Its text, of the first ``most`` tokens if given; its ids where the run has no tokeniser."""
        if self.row is not None:
            return json.dumps(self.row, ensure_ascii=False)
        ids = self.ids[:most].tolist()
        return decode(ids) if decode is not None else " ".join(map(str, ids))

    def document(self, decode: Decode | None) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "sample": self.index,
            "source": self.source,
            "spec": self.spec,
            "tokens": self.tokens,
            **({} if self.row is None else {"row": self.row}),
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


def look(servers: Servers, at: int | None, count: int) -> View:
    """The ``count`` samples from ``at`` on; None: from where the ledger stands.

    Raises ``ServerUnreachable``, and what the server answers.
    """
    for target in servers.targets:
        try:
            with servers.channel(target) as channel:
                return _look(DataLoaderStub(channel), servers.metadata, servers.run, at, count)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or target == servers.targets[-1]:
                raise _failure(servers.url, error) from None
    raise AssertionError("unreachable: there is at least one address")


class Servers:
    """The servers of a run, as a URL names them, and how they are reached."""

    def __init__(
        self,
        url: str,
        environment: Mapping[str, str],
        *,
        token_file: Path | None = None,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        """Token and files of TLS are those given, else the environment's (see ``Credentials``).

        Raises ``ConfigError`` for another URL than ``grpc://host:port/run`` or ``grpcs://…`` (several addresses with
        commas between), and where the token would travel unencrypted to another machine.
        """
        self.url = url
        self.targets, self.run, tls = _parse(url)
        try:
            self._credentials = Credentials.find(
                [target.rpartition(":")[0] for target in self.targets],
                tls=tls,
                token=token_to_look(environment, token_file),
                tls_ca=tls_ca,
                tls_cert=tls_cert,
                tls_key=tls_key,
                environment=environment,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.metadata = self._credentials.metadata

    def channel(self, target: str) -> grpc.Channel:
        return _channel(target, self._credentials)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a range of samples begins, and of which run it is: ``record`` is what its snapshots say in every place."""

    record: Mapping[str, Any]
    digest: str
    total_tokens: int
    sequence_length: int
    labels: str
    vocab_size: int
    dtype: np.dtype[Any]


class Following:
    """Consecutive samples of a run, however many, from one server or another."""

    def __init__(self, servers: Servers, begin: int, end: int | None, *, clock: Callable[[], float]) -> None:
        """``end``: None for where the ledger stands. Nothing is asked before the first sample is."""
        self._servers = servers
        self._clock = clock
        self.index = self.begin = begin
        self.end = end
        self._start: Start | None = None
        self._digest = ""

    @property
    def start(self) -> Start:
        """Known from the first sample on."""
        assert self._start is not None
        return self._start

    def samples(self) -> Iterator[Seen]:
        """Goes on where it was when a server goes away, for ``PATIENCE_S``.

        Raises ``ServerUnreachable``, ``BeyondHorizon`` where the data end before, and what the server answers.
        """
        targets = itertools.cycle(self._servers.targets)
        heard = self._clock()
        while self.end is None or self.index < self.end:
            before = self.index
            try:
                with self._servers.channel(next(targets)) as channel:
                    reason = yield from self._from(DataLoaderStub(channel))
            except grpc.RpcError as error:
                heard = self._clock() if self.index > before else heard
                if error.code() is not grpc.StatusCode.UNAVAILABLE or self._clock() - heard > PATIENCE_S:
                    raise _failure(self._servers.url, error) from None
                time.sleep(_PAUSE_S)
                continue
            if reason is not None and self.index == before:
                raise errors.BeyondHorizon(
                    f"sample {self.index} does not exist: {reason}; ask for samples up to {self.index}"
                )

    def _begin(self, joined: wire.JoinResponse) -> None:
        if joined.global_batch_size:
            raise ConfigError(
                f"run {self._servers.run!r} gives rows that are ready tensors, which no file of ids can hold: read "
                "them with PeekDataset(url, at=…)"
            )
        if self._digest and joined.start_digest != self._digest:
            raise errors.OrderMismatch(
                f"sample {self.index} has digest {joined.start_digest} at the server that answers now, but the samples "
                f"before have {self._digest}: its data, tokeniser or software are others; begin again"
            )
        self._start = self._start or Start(
            record=json.loads(joined.snapshot_template),
            digest=joined.start_digest,
            total_tokens=joined.start_tokens,
            sequence_length=joined.sequence_length,
            labels="shifted" if joined.labels == wire.LABELS_SHIFTED else "same",
            vocab_size=joined.vocab_size,
            dtype=np.dtype(f"u{int(joined.id_type)}"),
        )

    def _from(self, stub: DataLoaderStub) -> Generator[Seen, None, str | None]:
        """The samples of one stream, and why the data ended there if they did."""
        metadata = self._servers.metadata
        request = wire.JoinRequest(run=self._servers.run, peek=True, world_size=1, batch_size=1, resume=str(self.index))
        joined = stub.Join(request, timeout=_DEADLINE_S, metadata=metadata)
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
        self._begin(joined)
        sources = {source.id: NamedSource(source.spec, source.alias) for source in joined.sources}
        seen_all = threading.Event()
        count = _MANY if self.end is None else min(self.end - self.index, _MANY)
        try:
            requests = _requests(self._servers.run, joined, count, seen_all, None)
            for response in stub.Stream(requests, metadata=metadata):
                if self.end is None:
                    self.end = response.committed_through
                if response.WhichOneof("kind") == "end_of_data":
                    return str(response.end_of_data.reason)
                if response.batches.HasField("base"):
                    sources |= sources_of(response.batches.base.resume_state)
                for seen in _samples(joined, sources, response.batches):
                    if self.index < self.end:
                        self.index, self._digest = seen.index + 1, seen.digest
                        yield seen
                if self.index >= min(self.end, joined.start_index + count):
                    return None
        finally:
            seen_all.set()
        return None


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
            made = _rows if joined.global_batch_size else _samples
            samples += [seen for seen in made(joined, sources, response.batches) if seen.index >= (at or 0)]
            if len(samples) >= count:
                break
    finally:
        seen_all.set()
    return View(run=run, committed=committed, samples=samples[:count], end=end, decode=_decoder(stub, metadata, run))


def _requests(
    run: str, joined: wire.JoinResponse, count: int, seen_all: threading.Event, limit_s: float | None = _DEADLINE_S
) -> Iterator[wire.StreamRequest]:
    start = joined.start_index
    yield wire.StreamRequest(
        open=wire.StreamOpen(
            run=run,
            run_uid=joined.run_uid,
            received_through=start,
            # Of batches one more: the sample that was asked for may lie within the first.
            progress=wire.Progress(
                consumed_through=start,
                credit_steps=count if not joined.global_batch_size else count // joined.global_batch_size + 2,
            ),
            document_starts=True,
            peek=True,
            batch_size=1,
        )
    )
    # A side that is closed is a stream that ends.
    seen_all.wait(limit_s)


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
        begin = form.begin(len(ids))
        inside = sum(start < length for start in starts)
        yield Seen(
            index=step.end_index - 1,
            source=sources[source].alias,
            spec=sources[source].spec,
            # Of a sample that is full, the last id may be only a label.
            ids=ids[: length - begin],
            # What goes on from the sample before is a document of this one, too.
            documents=inside + (begin not in starts),
            digest=step.digest,
            total_tokens=step.total_tokens,
            read=ids,
            starts=tuple(start - begin for start in starts),
        )


def _rows(joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches) -> Iterator[Seen]:
    """The samples of a message whose steps are batches of rows."""
    size, at, data = joined.global_batch_size, 0, memoryview(batches.ids)
    nothing = np.empty(0, np.uint8)
    for number, (step, bucket) in enumerate(zip(batches.steps, batches.buckets, strict=True)):
        batch = Batch(
            bucket.name, tuple(Feature(column.name, column.dtype, tuple(column.shape)) for column in bucket.columns)
        )
        source = sources[batches.source_ids[number * size]]
        for place in range(size):
            own = bucket.sample_bytes[place] if bucket.sample_bytes else size_of(batch, data[at:])
            yield Seen(
                index=step.end_index - size + place,
                source=source.alias,
                spec=source.spec,
                ids=nothing,
                documents=1,
                digest=step.digest,
                total_tokens=step.total_tokens - size + place + 1,
                read=nothing,
                starts=(),
                row={"bucket": batch.bucket, **described(batch, data[at : at + own])},
            )
            at += own


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

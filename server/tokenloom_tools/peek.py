"""Samples of a served run over gRPC, which needs no torch and no training: decoded from a peek's messages; a few, as
``tokenloom peek`` shows them; and a range, however long, from one server or another, which an export reads."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.resume import NamedSource, sources_of
from tokenloom_proto.versions import own_release
from tokenloom_server.errors import BeyondHorizon, ConfigError, OrderMismatch
from tokenloom_server.packing.base import Batch, Feature
from tokenloom_server.packing.buckets import described, size_of
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.tokenizer.engine import Decode, bytes_decoder, load_decoder

from tokenloom_tools.servers import Servers


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekedSample:
    """One sample of a run."""

    index: int
    source: str
    spec: str
    #: Its tokens, without padding; for a row, nothing.
    ids: npt.NDArray[np.integer[Any]]
    #: How many documents have tokens in it.
    documents: int
    #: The rolling digest after it; of a batch of rows after its last one.
    digest: str
    #: Total tokens of the run after it.
    total_tokens: int
    #: Its ids as they travel, without padding: where labels are the next ids, one more.
    ids_with_label: npt.NDArray[np.integer[Any]]
    #: Where documents begin among these, ascending; not where it goes on with one from the sample before.
    starts: tuple[int, ...]
    #: Of a row that travels as it is, its columns, for people.
    row: Mapping[str, Any] | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it counts as, without padding; a row is one."""
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


def format_of(joined: wire.JoinResponse) -> SampleFormat:
    """How samples of ids travel."""
    return SampleFormat(
        length=joined.sequence_length,
        width=joined.sequence_length + (joined.labels == wire.LABELS_SHIFTED),
        dtype=np.dtype(f"u{int(joined.id_type)}"),
        lengths=joined.sample_lengths,
        masked=joined.loss_masks,
        padding="left" if joined.pads_left else "right",
    )


def decode_batches(
    joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches
) -> Iterator[PeekedSample]:
    """The samples of a message of a peek; ``sources`` by number."""
    return (_rows if joined.global_batch_size else _samples)(joined, sources, batches)


def _samples(
    joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches
) -> Iterator[PeekedSample]:
    """Samples of ids, one for each micro-step."""
    form = format_of(joined)
    length = form.length
    size, first = form.sample_bytes, 0
    samples = [batches.ids[begin : begin + size] for begin in range(0, len(batches.ids), size)]
    for step, sample, source, count in zip(
        batches.micro_steps, samples, batches.source_ids, batches.document_counts, strict=True
    ):
        starts = batches.document_starts[first : first + count]
        first += count
        ids = form.ids(sample)
        begin = form.begin(len(ids))
        inside = sum(start < length for start in starts)
        yield PeekedSample(
            index=step.end_index - 1,
            source=sources[source].alias,
            spec=sources[source].spec,
            # Of a sample that is full, the last id may be only a label.
            ids=ids[: length - begin],
            # What goes on from the sample before is a document of this one, too.
            documents=inside + (begin not in starts),
            digest=step.digest,
            total_tokens=step.total_tokens,
            ids_with_label=ids,
            starts=tuple(start - begin for start in starts),
        )


def _rows(
    joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches
) -> Iterator[PeekedSample]:
    """Rows that travel as they are; each micro-step is a batch of them."""
    size, offset, data = joined.global_batch_size, 0, memoryview(batches.ids)
    nothing = np.empty(0, np.uint8)
    for number, (step, bucket) in enumerate(zip(batches.micro_steps, batches.buckets, strict=True)):
        batch = Batch(
            bucket.name,
            tuple(
                Feature(column.name, column.dtype, tuple(column.shape)) for column in bucket.columns
            ),
        )
        source = sources[batches.source_ids[number * size]]
        for row in range(size):
            own = bucket.sample_bytes[row] if bucket.sample_bytes else size_of(batch, data[offset:])
            yield PeekedSample(
                index=step.end_index - size + row,
                source=source.alias,
                spec=source.spec,
                ids=nothing,
                documents=1,
                digest=step.digest,
                total_tokens=step.total_tokens - size + row + 1,
                ids_with_label=nothing,
                starts=(),
                row={"bucket": batch.bucket, **described(batch, data[offset : offset + own])},
            )
            offset += own


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

"""The service without a socket: a channel whose calls are made in this process, while a thread waits for them.

Requests and responses are serialised as on any other way, so that what a client does with them is the same; but
micro-steps are handed over as they are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from tokenloom_proto.delivered import Delivered
from tokenloom_proto.threads import Background, pool

from tokenloom_server.api.auth import Access
from tokenloom_server.api.grpc.rpc import Call, details_of, metadata_of, shown
from tokenloom_server.api.grpc.servicer import SERVICE, DataLoader
from tokenloom_server.api.grpc.stream import BREAK_S, FINISH_S, NO_OPENING, ClientStream
from tokenloom_server.api.mixture_origin import INDEX_FOLDER, MixtureOrigin
from tokenloom_server.api.service import Runs
from tokenloom_server.catalog import environment_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import ConfigError, JoinRefused
from tokenloom_server.ledger.open import FILE_NAME
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.run.timeouts import Timeouts

_Serializer = Callable[[Any], bytes]
_Deserializer = Callable[[bytes], Any]
_ADDRESS = "this process"


class InProcessChannel(grpc.Channel):
    """To the runs of this process; whoever has it may do everything. Closing it ends nothing."""

    def __init__(self, runs: Runs) -> None:
        self._loader = DataLoader(runs, Access(), hands_over=True)

    def unary_unary(  # type: ignore[override]  # generated stubs give both
        self,
        method: str,
        request_serializer: _Serializer,
        response_deserializer: _Deserializer,
        **_: Any,
    ) -> Any:
        """A method of one request and one response. Deadlines are not kept: nobody here waits for another rank."""
        name = _name(method)

        def call(request: Any, **_: object) -> Any:
            data, made = request_serializer(request), Call(None, _ADDRESS)
            # On a thread of its own: what a handler of signals raises, on the main one, is no failure of the server's.
            with pool(1, "call") as thread:
                work = thread.submit(self._loader.respond, name, data, made)
                try:
                    error = work.exception()
                finally:
                    made.active = False
            if isinstance(error, Exception):
                raise _failure(self._loader, name, error) from None
            return response_deserializer(work.result())

        return call

    def stream_stream(  # type: ignore[override]  # the first is always given
        self,
        method: str,
        request_serializer: _Serializer,
        response_deserializer: _Deserializer | None = None,
        **_: Any,
    ) -> Any:
        """A method of many requests and many responses; these as bytes without a deserializer, or as ``Delivered``."""
        _name(method)

        def call(requests: Iterable[Any], **_: object) -> InProcessCall:
            return InProcessCall(
                self._loader, map(request_serializer, requests), response_deserializer
            )

        return call

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the service has no method of this kind")

    def stream_unary(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the service has no method of this kind")

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False
    ) -> None:
        callback(grpc.ChannelConnectivity.READY)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """The channel is always ready, so there is nothing to report."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> InProcessChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InProcessCall:
    """A stream that goes on as long as it is iterated."""

    def __init__(
        self, loader: DataLoader, requests: Iterator[bytes], deserializer: _Deserializer | None
    ) -> None:
        self._loader, self._requests, self._deserializer = loader, requests, deserializer
        self._call = Call(None, _ADDRESS)
        self._stream: ClientStream | None = None
        self._at_work = threading.Lock()

    def __iter__(self) -> InProcessCall:
        return self

    def __next__(self) -> Any:
        with self._at_work:
            try:
                item = self._next()
            except Exception as error:
                self._end()
                raise _failure(self._loader, "Stream", error) from None
            if item is None:
                self._end()
                raise StopIteration
        return self._deserializer(item) if self._deserializer and isinstance(item, bytes) else item

    def cancel(self) -> bool:
        """Ends the call: now, or, where it is at work, as soon as it looks whether somebody is still there."""
        self._call.active = False
        if self._stream is not None:
            self._stream.wake()
        if self._at_work.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._at_work.release()
        return True

    def _next(self) -> bytes | Delivered | None:
        """None where the call is over."""
        if not self._call.active:
            return None
        if self._stream is None:
            first = next(self._requests, None)
            if first is None:
                raise JoinRefused(NO_OPENING)
            self._stream = self._loader.open(first, self._call)
            Background("progress", self._read, self._stream.coordinator.name).start()
        item = self._stream.next()
        if item is None and self._stream.closed:
            time.sleep(BREAK_S)
            if self._call.active:
                self._stream.has_committed(FINISH_S)
                self._stream.leave()
        return item

    def _read(self) -> None:
        """What the client says meanwhile."""
        assert self._stream is not None
        for data in self._requests:
            self._stream.read(data)
            if self._stream.is_over():
                return
        self._stream.read(None)

    def _end(self) -> None:
        self._call.active = False
        self._call.until_end.close()


class CallFailed(grpc.RpcError):
    """How a call ended: what the client asks of any error of gRPC."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[_Entry, ...]) -> None:
        super().__init__(details)
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing


class _Entry(NamedTuple):
    key: str
    value: str


def _failure(loader: DataLoader, name: str, error: Exception) -> CallFailed:
    ending = shown(error)
    loader.count_error(name, _ADDRESS, ending)
    entries = tuple(_Entry(*entry) for entry in metadata_of(ending))
    return CallFailed(getattr(grpc.StatusCode, ending.grpc_status), details_of(ending), entries)


def _name(method: str) -> str:
    service, _, name = method.strip("/").partition("/")
    if service != SERVICE.full_name or name not in DataLoader.rpcs():
        raise NotImplementedError(f"{method} is no method of the service")
    return name


#: Nobody can go on from this ledger: what is committed only frees the window. ``close`` waits for a last one.
COMMIT_EVERY_S = 0.1


class LocalServer:
    """One mixture file, served to this process alone.

    Its ledger goes with it: where the process goes on, it does so from a trainer's state, which an empty ledger takes.
    So nothing stays on disk, and no other server of the run is in the way.
    """

    def __init__(self, mixture: Path) -> None:
        """Reads the mixture file alone, which raises ``ConfigError`` where it is missing or wrong."""
        if "TOKENLOOM_SERVE_READERS" in os.environ:
            raise ConfigError(
                "TOKENLOOM_SERVE_READERS is set, but a server within the training process has no readers: unset it, or "
                "start 'tokenloom serve --readers', and give the dataset that server's address"
            )
        self._mixture = mixture.absolute()  # the process may go elsewhere before it is started
        self._config = config.load(mixture, environment_catalog())
        self._open = ExitStack()

    @property
    def run(self) -> str:
        """The run's name."""
        return self._config.run

    def start(self) -> InProcessChannel:
        """Opens the sources and begins to produce. Raises what sources and tokeniser raise; nothing is left open
        then."""
        with ExitStack() as opened:
            folder = Path(tempfile.mkdtemp(prefix="tokenloom-"))
            try:
                ledger = SqliteLedger(folder / FILE_NAME)
                opened.callback(ledger.close)
                ledger.check()
            finally:
                # Its one connection has it open, and that is enough: nothing stays on disk, however this process ends.
                shutil.rmtree(folder, ignore_errors=True)
            ledger.forget_path()
            runs = Runs(ledger, timeouts=Timeouts(commit_every_s=COMMIT_EVERY_S))
            opened.callback(runs.stop)
            base = self._mixture.resolve().parent
            runs.add_from(
                MixtureOrigin(
                    where=str(self._mixture),
                    index_dir=base / INDEX_FOLDER,
                    mixture=self._config,
                    folder=base,
                )
            )
            self._open = opened.pop_all()
            return InProcessChannel(runs)

    def close(self) -> None:
        """Ends the run's threads, in a bounded time. Further calls do nothing."""
        self._open.close()

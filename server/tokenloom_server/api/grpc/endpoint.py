"""Calls that come by gRPC: who may make them, how many of a kind are worked for at a time, and how each is served."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tokenloom_proto.threads import pool
from tokenloom_proto.versions import VERSION, version_of

from tokenloom_server.api.auth import Access, Scope, Token
from tokenloom_server.api.grpc.rpc import Call, Rpc, details_of, metadata_of, read, shown
from tokenloom_server.api.grpc.servicer import SERVICE, DataLoader
from tokenloom_server.api.grpc.stream import (
    BREAK_S,
    FINISH_S,
    HEARTBEAT_S,
    NO_OPENING,
    ClientStream,
)
from tokenloom_server.api.service import Runs
from tokenloom_server.errors import JoinRefused, ProtocolError, TokenloomError
from tokenloom_server.run.sessions import Session


def close_connection(address: str) -> None:
    """``address``: of the client, as gRPC has it, such as ``ipv4:10.0.0.7:40312``. Where it is gone, does nothing."""
    host, _, port = address.partition(":")[2].rpartition(":")
    with suppress(ValueError):
        peer = _plain(host.strip("[]")), int(port)
        for descriptor in Path("/dev/fd").iterdir():
            with suppress(OSError, ValueError):
                _shut(int(descriptor.name), peer)


def _shut(descriptor: int, peer: tuple[IPv4Address | IPv6Address, int]) -> None:
    own = os.dup(descriptor)  # else another thread might close it, and the number be another file's
    if not stat.S_ISSOCK(os.fstat(own).st_mode):
        os.close(own)
        return
    with socket.socket(fileno=own) as connection:
        host, port = connection.getpeername()[:2]
        if (_plain(host), port) == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _plain(host: str) -> IPv4Address | IPv6Address:
    """An address, that of IPv4 where it is one within IPv6's."""
    address = ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address


#: Bells that are answered before the loop looks what else there is: a call that comes, one of another kind.
TURNS = 4


class Bell(asyncio.Event):
    """What is set where a stream may have something to say."""

    #: Whether its turn comes anyway.
    is_rung = False


class Rings:
    """Those of one loop, on which it is made."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._rung: deque[Bell] = deque()
        self._is_answered = True
        self._streams: dict[Bell, ClientStream] = {}
        self._ticking = self._loop.create_task(self._tick())

    @contextmanager
    def bell(self, stream: ClientStream) -> Iterator[Bell]:
        """A stream's, as long as that goes on."""
        bell = Bell()
        self._streams[bell] = stream
        try:
            yield bell
        finally:
            del self._streams[bell]

    def ring(self, bell: Bell) -> None:
        """Any thread may ring. However many bells ring, the loop is woken once: that costs a system call."""
        if bell.is_rung:
            return
        bell.is_rung = True
        self._rung.append(bell)
        if self._is_answered:
            self._is_answered = False
            own = threading.get_ident() == self._thread
            (self._loop.call_soon if own else self._loop.call_soon_threadsafe)(self._answer)

    def close(self) -> None:
        """Nobody rings any more."""
        self._ticking.cancel()

    def _answer(self) -> None:
        self._is_answered = True
        for _ in range(min(TURNS, len(self._rung))):
            bell = self._rung.popleft()
            bell.is_rung = False
            bell.set()
        if self._rung and self._is_answered:
            self._is_answered = False
            self._loop.call_soon(self._answer)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S / 4)
            now = time.monotonic()
            for bell, stream in self._streams.items():
                if stream.is_due(now):
                    bell.set()


_T = TypeVar("_T")

#: Calls at a time of those who do not train, each with a thread while there is work for it. They take none of the
#: trainers', strangers none of those who look, and no more requests than this are in memory at a time, each of
#: MAX_REQUEST_BYTES at most.
OPEN_CALLS, READ_CALLS, PEEK_CALLS = 8, 16, 32
#: Streams of one rank at a time: the newest, and the one whose place it took, which hears of that. One that is older
#: still goes on only where its client does not read: what it was sent would stay in memory.
STREAMS_OF_A_RANK = 2
#: A stream whose first message does not come within this time is ended, seconds: it has a place.
OPEN_TIMEOUT_S = 30.0
#: How often a stream looks whether its last commit is there, or an opening is written, seconds.
TICK_S = 0.02
#: A client that reads nothing has so long to hear that its call has ended, seconds; then its connection is closed.
GOODBYE_S = 1.0
#: The RPCs of gRPC's own services.
OTHER_RPCS: Mapping[str, Rpc] = {
    "/grpc.health.v1.Health/Check": Rpc(Scope.OPEN),
    # It stays open for as long as the caller likes; a stranger could take every place with it.
    "/grpc.health.v1.Health/Watch": Rpc(Scope.READ),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rpc(Scope.READ),
}


class Places:
    """So many calls of a kind of caller at a time. The others wait, and nothing of them is read."""

    def __init__(self, calls: int, threads: Executor) -> None:
        self.free, self._threads = asyncio.Semaphore(calls), threads

    async def work(self, call: Call, work: Callable[..., _T], *arguments: Any) -> _T:
        """Has a thread do it. Where the call is over meanwhile, its place is free once the work has ended."""
        working = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(work, *arguments)
        )
        working.add_done_callback(asyncio.Future.exception)  # nobody may be there to hear of it
        try:
            await asyncio.wait([working])
        finally:
            if not working.done():
                call.active = False
                await asyncio.wait([working])
        return working.result()

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class Endpoint(grpc.GenericRpcHandler):
    """The data loader and gRPC's own services, as gRPC's loop calls them. Every method is a stream of bytes to gRPC: so
    nothing of a call is read before it may be."""

    def __init__(self, access: Access, loader: DataLoader, runs: Runs, calls: int) -> None:
        """``calls``: at a time; the next one is refused."""
        self._access, self._loader, self._count_error = access, loader, runs.rpc_errors.add
        self._calls, self._most_calls = 0, calls
        self._trainers = Places(calls, pool(calls, "grpc"))
        self._open = Places(OPEN_CALLS, pool(OPEN_CALLS, "grpc-open"))
        self._reads = Places(READ_CALLS, pool(READ_CALLS, "grpc-reads"))
        self._peeks = Places(PEEK_CALLS, pool(PEEK_CALLS, "grpc-peeks"))
        self._rings = Rings()
        #: Calls of a run's rank, oldest first.
        self._of_rank: dict[Any, list[Call]] = defaultdict(list)
        self._others: list[grpc.GenericRpcHandler] = []
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self)
        self._named = (SERVICE.full_name, "", runs.identity)

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Takes one of gRPC's own services."""
        self._others += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same ones, as the sync server would have them."""

    async def begin(self) -> None:
        """Calls may come."""
        for name in self._named:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def end(self) -> None:
        """Calls are about to end."""
        await self._health.enter_graceful_shutdown()

    def close(self) -> None:
        """No call comes any more."""
        for places in (self._trainers, self._open, self._reads, self._peeks):
            places.close()
        self._rings.close()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """What serves a call, of which only its head has come. Checks its token."""
        method = details.method
        version = version_of(method) or VERSION
        # Whether a method exists at all is only for those who may do everything.
        rpc = rpcs().get(method, Rpc(Scope.ADMIN)) if version == VERSION else Rpc(Scope.READ)
        try:
            authorization = authorization_of(details.invocation_metadata)
            held = self._access.check(authorization, rpc.scope)
            if version != VERSION:
                raise ProtocolError(
                    f"this client speaks version {version} of Tokenloom's wire protocol, and this server version "
                    f"{VERSION}: install the same release of tokenloom on both sides"
                )
        except TokenloomError as error:
            name = method.rpartition("/")[2] if method in rpcs() else "other"
            self._count_error(name, error.grpc_status, error.name)
            return grpc.stream_stream_rpc_method_handler(partial(self._refuse, method, error))
        if method not in rpcs():
            return None
        places, serialise = self._trainers, None
        serve: Callable[..., Awaitable[None]] = self._respond
        if not rpc.trains:
            places = self._open if rpc.scope is Scope.OPEN else self._reads
        elif held.scope < Scope.TRAIN:
            places = self._peeks
        if rpc.streams:
            serve = self._converse
        elif method in OTHER_RPCS:
            handler = self._handler_of_other(details)
            serve, serialise = partial(self._pass_on, handler, held), handler.response_serializer
        call = partial(self._serve, serve, method, places, authorization)
        return grpc.stream_stream_rpc_method_handler(call, response_serializer=serialise)

    def _handler_of_other(self, details: grpc.HandlerCallDetails) -> Any:
        """What serves a call of one of gRPC's own services."""
        for other in self._others:
            if handler := other.service(details):
                return handler
        # Reflection. Not at the top: no trainer asks for it, and a start would wait 5 ms for it.
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        servicer = reflection.aio.ReflectionServicer(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, self)
        return self._handler_of_other(details)

    async def _refuse(self, method: str, error: TokenloomError, _: object, context: Any) -> None:
        self._access.refusals.note(method, unquote(context.peer()), str(error))
        await _abort(context, error)

    async def _serve(
        self,
        serve: Callable[..., Awaitable[None]],
        method: str,
        places: Places,
        authorization: str | None,
        *of_grpc: Any,
    ) -> None:
        """One call, from its beginning to its end."""
        context, task = of_grpc[-1], asyncio.current_task()
        assert task is not None
        # Counted here: grpc.aio's own bound counts calls that it refused as ended ones, and lets others in for them.
        if self._calls >= self._most_calls:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the server has {self._calls} calls, as many as it takes at a time; ask again",
            )
        self._calls += 1
        call = Call(authorization, unquote(context.peer()))
        call.on_cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        try:
            try:
                async with places.free:
                    await serve(method, places, call, context)
            except grpc.aio.BaseError:
                raise
            except Exception as error:
                ending = shown(error)
                self._loader.count_error(method.rpartition("/")[2], call.address, ending)
                await _abort(context, ending)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as gone:
            raise asyncio.CancelledError from gone  # else gRPC logs a trace
        except asyncio.CancelledError:
            if call.is_cancelled:
                await _let_go(context, call.address)
            raise
        finally:
            self._calls -= 1
            call.active = False
            call.until_end.close()

    async def _respond(self, method: str, places: Places, call: Call, context: Any) -> None:
        data = await context.read()
        if data is not grpc.aio.EOF:
            name = method.rpartition("/")[2]
            await context.write(await places.work(call, self._loader.respond, name, data, call))

    async def _pass_on(
        self, handler: Any, held: Token, method: str, places: Places, call: Call, context: Any
    ) -> None:
        """A call of one of gRPC's own services. Their messages are read as ours are: gRPC itself logs a trace for a
        malformed one."""
        self._access.hold(call, held, rpcs()[method].scope)

        async def requests() -> AsyncIterator[Any]:
            while (data := await context.read()) is not grpc.aio.EOF:
                yield read(handler.request_deserializer, data)

        if handler.request_streaming:
            async for response in handler.stream_stream(requests(), context):
                await context.write(response)
            return
        async for request in requests():
            if handler.response_streaming:
                await handler.unary_stream(request, context)
            else:
                await context.write(await handler.unary_unary(request, context))
            return

    async def _converse(self, method: str, places: Places, call: Call, context: Any) -> None:
        """A stream, until the data end, its client closes its side, or something else ends it."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.CANCELLED, f"no message came for {OPEN_TIMEOUT_S:g} s"
            )
        if first is grpc.aio.EOF:
            raise JoinRefused(NO_OPENING)
        stream = await places.work(call, self._loader.open, first, call)
        reading = asyncio.create_task(self._read(stream, context))
        call.until_end.callback(reading.cancel)
        try:
            if stream.session is not None:
                await self._send(stream, stream.session, call, context)
            else:
                while (item := await places.work(call, stream.next)) is not None:
                    await context.write(item)
            await asyncio.sleep(BREAK_S)
            try:
                deadline = time.monotonic() + FINISH_S
                while time.monotonic() < deadline:
                    await self._lock_free(stream)
                    if stream.has_committed(0.0):
                        break
                    await asyncio.sleep(TICK_S)
            finally:
                await self._lock_free(stream)
                stream.leave()
        finally:
            await self._lock_free(stream)

    async def _send(self, stream: ClientStream, session: Session, call: Call, context: Any) -> None:
        """What a rank gets, until its client has closed its side."""
        key = stream.coordinator, session.rank
        calls = self._of_rank[key]
        calls.append(call)
        call.until_end.callback(self._forget, key, call)
        for older in calls[:-STREAMS_OF_A_RANK]:
            older.cancel()
        with self._rings.bell(stream) as bell:
            ring = partial(self._rings.ring, bell)
            stream.ring_by(ring)
            while not stream.closed:
                await bell.wait()
                bell.clear()
                await self._lock_free(stream)
                if (item := stream.now()) is not None:
                    await context.write(item)
                    del (
                        item
                    )  # else the last message of each rank stays in memory until its next one
                    if (
                        bell.is_set()
                    ):  # the next one has its turn, after what others were sent is let go
                        bell.clear()
                        ring()

    async def _read(self, stream: ClientStream, context: Any) -> None:
        """What a stream's client says meanwhile."""
        try:
            while not stream.is_over():
                data = await context.read()
                await self._lock_free(stream)
                stream.read(None if data is grpc.aio.EOF else data)
        except grpc.aio.BaseError:
            """The call is over."""

    async def _lock_free(self, stream: ClientStream) -> None:
        """Comes back when nobody writes an opening, which holds the run's lock for as long as the ledger takes."""
        while stream.is_held:
            await asyncio.sleep(TICK_S)

    def _forget(self, key: Any, call: Call) -> None:
        self._of_rank[key].remove(call)
        if not self._of_rank[key]:
            del self._of_rank[key]


async def _abort(context: Any, error: TokenloomError) -> None:
    """Ends a call with an error: its name and what else a client may know of it in the metadata, the message in the
    details."""
    await context.abort(
        getattr(grpc.StatusCode, error.grpc_status), details_of(error), metadata_of(error)
    )


async def _let_go(context: Any, address: str) -> None:
    """Ends a call whose client perhaps reads nothing."""
    try:
        async with asyncio.timeout(GOODBYE_S):
            await context.abort(grpc.StatusCode.CANCELLED, "the server has ended this call")
    except (TimeoutError, grpc.aio.InternalError, grpc.aio.UsageError):
        close_connection(address)


@cache
def rpcs() -> Mapping[str, Rpc]:
    """Every RPC of the server by its path."""
    return {
        **OTHER_RPCS,
        **{f"/{SERVICE.full_name}/{name}": rpc for name, rpc in DataLoader.rpcs().items()},
    }


def authorization_of(metadata: Iterable[Any]) -> str | None:
    """The call's ``authorization``, where it has exactly one."""
    values = [value for key, value in metadata if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None

"""A TCP proxy on loopback that can spoil what passes: delay it, hold it back, lose it, cut it, refuse it.

TCP loses no bytes of a connection that lives, so what a real network does to one shows in three ways: bytes come late
(``delay``, ``hold``), the connection ends (``reset``, ``cut``, ``refuse``), or bytes vanish and the connection with
them once somebody notices (``swallow``: what came is thrown away, and ``heal`` resets the connection).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from support.ports import free_port

Direction = Literal["up", "down"]
"""``up``: from the one who connected to the target."""
_T = TypeVar("_T")
_CHUNK_BYTES = 65536
#: The proxy itself answers at once; this only bounds a test that is wrong.
_CONTROL_DEADLINE_S = 10.0


class ProxyLoop:
    """One thread that moves the bytes of any number of proxies."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_CONTROL_DEADLINE_S)

    def close(self) -> None:
        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CONTROL_DEADLINE_S)
        self.loop.close()


@dataclass(eq=False)
class _Connection:
    """Both halves, and what is wrong with them."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    gates: dict[Direction, asyncio.Event] = field(default_factory=dict)
    swallows: set[Direction] = field(default_factory=set)
    lost_bytes: bool = False

    def reset(self) -> None:
        """RST to both sides, without a word."""
        for writer in (self.near, self.far):
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        for gate in self.gates.values():
            gate.set()


class Proxy:
    """Forwards ``port`` to the target on loopback. Its methods may be called from any thread; all return at once."""

    def __init__(self, loop: ProxyLoop, target_port: int) -> None:
        self._loop = loop
        self.target_port = target_port
        self.port = free_port()
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        # What new connections and chunks meet.
        self._delay_s = 0.0
        self._held: set[Direction] = set()
        self._swallows: set[Direction] = set()
        self._cut: dict[Direction, int] = {}
        loop.call(self._listen())

    # Faults

    def delay(self, seconds: float) -> None:
        """Each piece comes so much later, in both directions."""
        self._delay_s = seconds

    def hold(self, *directions: Direction, new_ones: bool = True) -> None:
        """Keeps what passes until ``heal``, which delivers it: even what the sender has long given up.

        Without ``new_ones``, connections that are made later are spared.
        """

        async def do() -> None:
            if new_ones:
                self._held |= set(directions)
            for connection in self._connections:
                for direction in directions:
                    connection.gates[direction].clear()

        self._loop.call(do())

    def swallow(self, *directions: Direction) -> None:
        """Throws away what passes; ``heal`` resets the connections that lost something."""

        async def do() -> None:
            self._swallows |= set(directions)
            for connection in self._connections:
                connection.swallows |= set(directions)

        self._loop.call(do())

    def cut(self, direction: Direction, after_bytes: int) -> None:
        """Lets so many bytes more pass in one direction, over all connections, and resets the one they passed on.

        ``cut("down", 0)`` drops the next answer.
        """

        async def do() -> None:
            self._cut[direction] = after_bytes

        self._loop.call(do())

    @property
    def cut_done(self) -> bool:
        """Whether every ``cut`` has happened."""
        return not self._cut

    def reset(self) -> None:
        """Resets every connection."""

        async def do() -> None:
            for connection in list(self._connections):
                connection.reset()

        self._loop.call(do())

    def refuse(self) -> None:
        """Resets every connection, and takes no new ones until ``heal``."""

        async def do() -> None:
            await self._stop_listening()
            for connection in list(self._connections):
                connection.reset()

        self._loop.call(do())

    def heal(self) -> None:
        """The network is whole again."""

        async def do() -> None:
            self._delay_s = 0.0
            self._held.clear()
            self._swallows.clear()
            self._cut.clear()
            for connection in list(self._connections):
                connection.swallows.clear()
                for gate in connection.gates.values():
                    gate.set()
                if connection.lost_bytes:
                    connection.reset()
            if self._server is None:
                await self._listen()

        self._loop.call(do())

    def close(self) -> None:
        async def do() -> None:
            await self._stop_listening()
            for connection in list(self._connections):
                connection.reset()

        self._loop.call(do())

    # Forwarding, on the loop

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=_CHUNK_BYTES
        )

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            far_reader, far = await asyncio.open_connection(
                "127.0.0.1", self.target_port, limit=_CHUNK_BYTES
            )
        except OSError:
            _Connection(near, near).reset()
            return
        connection = _Connection(near, far, swallows=set(self._swallows))
        for direction in ("up", "down"):
            gate = connection.gates[direction] = asyncio.Event()
            if direction not in self._held:
                gate.set()
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(connection, "up", reader, far),
                self._pump(connection, "down", far_reader, near),
            )
        except OSError:
            pass
        finally:
            self._connections.discard(connection)
            # The far side reads to the end what was delivered to it, even where the near side is long gone.
            near.transport.abort()
            far.close()

    async def _pump(
        self,
        connection: _Connection,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        gate = connection.gates[direction]
        while chunk := await reader.read(_CHUNK_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await gate.wait()
            if direction in connection.swallows:
                connection.lost_bytes = True
                continue
            left = self._cut.get(direction)
            if left is not None:
                self._cut[direction] = left - len(chunk)
                if left <= len(chunk):
                    del self._cut[direction]
                    writer.write(chunk[:left])
                    with contextlib.suppress(OSError):
                        await writer.drain()
                    connection.reset()
                    return
            writer.write(chunk)
            await writer.drain()
        await gate.wait()
        with contextlib.suppress(OSError):
            if writer.can_write_eof():
                writer.write_eof()

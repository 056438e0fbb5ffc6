"""What lies between a rank and a server: delays, lost and doubled calls, streams that break at one end first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenloom_server.errors import TokenloomError

if TYPE_CHECKING:
    from tests.simulation.server import Server
    from tests.simulation.trainer import Rank
    from tests.simulation.world import World

#: How long the ends of a broken connection may not know of it, seconds.
NOTICED_WITHIN_S = 2.0
#: Or the server, which is sent nothing: its own keepalive tells it.
HALF_OPEN_S = 30.0


class Unavailable(TokenloomError):
    """What gRPC says where nobody answers."""

    grpc_status = "UNAVAILABLE"


class Stream:
    """One bidirectional call. What goes one way arrives in order, if it arrives."""

    def __init__(self, world: World, rank: Rank, server: Server) -> None:
        self._world = world
        self.rank = rank
        self.server = server
        self.broken = False
        self._loses_up = self._loses_down = False
        self._up_at = self._down_at = 0.0

    def up(self, work: Callable[..., None], *args: Any) -> None:
        """Has the server do something with what the client sent."""
        if not self.broken:
            self._up_at = max(self._up_at, self._world.now + self._world.latency())
            self._world.at_time(self._up_at, self.server, self._arrive_up, work, args)

    def down(self, work: Callable[..., None], *args: Any) -> None:
        """Has the rank do something with what the server sent."""
        if not self.broken:
            self._down_at = max(self._down_at, self._world.now + self._world.latency())
            self._world.at_time(self._down_at, self.rank, self._arrive_down, work, args)

    def _arrive_up(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self._loses_up:
            work(self, *args)

    def _arrive_down(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self._loses_down:
            work(self, *args)

    def cut(self, *, silently: bool = False) -> None:
        """Breaks the connection. What is under way may still arrive. ``silently``: the client has to find out."""
        if self.broken:
            return
        world, chance = self._world, self._world.rng.random
        self.broken = True
        self._loses_up, self._loses_down = chance() < 0.7, chance() < 0.7
        if not silently:
            world.soon(
                NOTICED_WITHIN_S,
                self.rank,
                self.rank.lost_stream,
                self,
                Unavailable("the connection broke"),
            )
        world.soon(
            HALF_OPEN_S if chance() < 0.3 else NOTICED_WITHIN_S,
            self.server,
            self.server.lost_stream,
            self,
        )

    def end(self, error: TokenloomError | None) -> None:
        """The server ends the call; ``error`` is its status."""
        self.down(self.rank.ended_by_server, error)
        self.broken = True

    def cancel(self) -> None:
        """The client ends the call; the server hears of it, in time."""
        if not self.broken:
            self.broken = True
            self._loses_down = True
            self._world.soon(NOTICED_WITHIN_S, self.server, self.server.lost_stream, self)


def call_join(world: World, rank: Rank, server: Server | None, number: int) -> None:
    """One try of a Join. The rank hears its answer, or that there is none."""
    if server is None or not server.reachable:
        world.soon(0.3, rank, rank.answered, number, Unavailable("nobody listens there"))
        return
    chance = world.rng.random
    call = rank.join_call()
    if chance() < world.loses_calls:
        # The client gives up; the request may be on its way all the same, and arrive much later.
        world.soon(1.0, rank, rank.answered, number, Unavailable("the connection broke"))
        if chance() < 0.6:
            world.at(world.latency() + chance() * 10, server, server.join, rank, call, -1)
        return
    server.calls[rank, number] = None
    world.at(world.latency(), server, server.join, rank, call, number)
    if chance() < world.loses_calls:
        world.at(world.latency() + chance() * 5, server, server.join, rank, call, -1)

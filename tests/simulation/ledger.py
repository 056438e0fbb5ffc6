"""One server's way to the ledger's store, with everything that can go wrong on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tokenloom_server.errors import LedgerUnavailable, TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Command

from tests.simulation.scheduler import Killed

if TYPE_CHECKING:
    from tests.simulation.server import Server
    from tests.simulation.world import World

#: How long a call takes at most, and one that hangs, seconds.
CALL_S, HANG_S = 0.004, 3.0
#: A write that was given up, or that is done twice, reaches the store so much later on average, seconds.
LATE_S = 1.5


class LedgerLink:
    """Implements ``Ledger`` for one server: every call goes to the store's, or wrong."""

    description = "memory"

    def __init__(self, world: World, server: Server) -> None:
        self._world = world
        self._server = server

    def identity(self) -> object:
        return None

    def history(self) -> None:
        """Worlds keep none, and to say so reaches no store."""

    def execute(self, command: Command) -> int:
        return int(self._call(command.verb, self._world.ledger.execute, command))

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        return Ledger.execute_all(cast("Ledger", self), some)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name, getattr(self._world.ledger, name))

    def _call(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        world, server = self._world, self._server
        fault = world.ledger_fault(name)
        if fault == "hangs":
            world.breathe(server, HANG_S)
        elif fault == "dies before":
            world.note(server.name, "killed before", name)
            world.kill_server(server)
            raise Killed(server.name)
        if fault == "busy" or world.rng.random() < world.plan.overlap:
            world.breathe(server, CALL_S)
        if world.ledger_is_away or fault in ("unreachable", "late"):
            if fault == "late" and not world.ledger_is_away:
                world.note(server.name, "given up, and on its way", name)
                world.at(world.rng.expovariate(1 / LATE_S), None, self._alone, name, call, args)
            world.note(server.name, "ledger away", name)
            raise LedgerUnavailable("the store cannot be reached")
        try:
            result = self._effect(name, call, args)
        finally:
            if world.rng.random() < world.plan.overlap:
                world.breathe(server, CALL_S)
        if fault == "twice":
            world.at(world.rng.expovariate(1 / LATE_S), None, self._alone, name, call, args)
        elif fault == "dies after":
            world.note(server.name, "killed after", name)
            world.kill_server(server)
            raise Killed(server.name)
        elif fault == "answer lost":
            world.note(server.name, "answer lost", name)
            raise LedgerUnavailable("the store did not answer")
        elif fault == "hangs after":
            world.breathe(server, HANG_S)
        return result

    def _effect(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = call(*args)
        self._world.checker.look_at_ledger(name, args, self._server)
        return result

    def _alone(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """A write that arrives when nobody waits for it any more."""
        if self._world.ledger_is_away:
            return
        try:
            self._effect(name, call, args)
        except TokenloomError as error:
            self._world.note("ledger", "late write refused", name, error.name)
        else:
            self._world.note("ledger", "late write", name)

"""Who asked for the work at hand, which runs they may see, and whether they still wait for it.

Said where a call comes in; what may take long asks between its turns, on whichever thread it does a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by the token that came with the call."""

    #: The token's.
    name: str
    #: Names of the runs that it is good for, or patterns (``*``, ``?``).
    runs: tuple[str, ...] = ("*",)
    #: Where the call comes from, as the connection has it; empty for the server itself.
    address: str = ""

    def sees(self, run: str) -> bool:
        return any(fnmatchcase(run, pattern) for pattern in self.runs)


#: Of the call that is worked for; for work of nobody's always true.
waits: ContextVar[Callable[[], bool]] = ContextVar("waits", default=lambda: True)
_SERVER = Caller("this server")
#: Of the call that is worked for; for work of nobody's the server itself, which sees every run.
who: ContextVar[Caller] = ContextVar("who", default=_SERVER)


@contextmanager
def serving(caller: Caller, waiting: Callable[[], bool]) -> Iterator[None]:
    """While a call is worked for."""
    tokens = who.set(caller), waits.set(waiting)
    try:
        yield
    finally:
        who.reset(tokens[0])
        waits.reset(tokens[1])


def has_gone() -> bool:
    """Whether nobody waits for the result any more: a client cancelled its call, or its connection is gone."""
    return not waits.get()()

"""Whether whoever asked for the work at hand still waits for it.

Said where a call comes in; what may take long asks between its turns, on whichever thread it does a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

waits: ContextVar[Callable[[], bool]] = ContextVar("waits", default=lambda: True)
"""Of the call that is worked for; for work of nobody's always true."""


def has_gone() -> bool:
    """Whether nobody waits for the result any more: a client cancelled its call, or its connection is gone."""
    return not waits.get()()

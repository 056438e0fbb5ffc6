"""What tools keep for a run or a server, which know nothing of it: one object of each class."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Companions:
    """The companions of one owner. Thread-safe."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._made: dict[Callable[..., Any], Any] = {}

    def __call__(self, kind: Callable[[Any], _T]) -> _T:
        """The one of a class, made with the owner as its argument when it is first asked for."""
        with self._lock:
            if kind not in self._made:
                self._made[kind] = kind(self._owner)
            made: _T = self._made[kind]
            return made

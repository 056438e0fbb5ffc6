"""Files that are read again when they change, as a whole or not at all, and what else is looked at again and again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from tokenloom_proto.threads import Loop

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: How often there is a look, seconds: a stream whose token was revoked ends so long, and at most its next heartbeat,
#: after that.
LOOK_EVERY_S = 1.0
#: What no look has reached for so long is stale, seconds.
STALE_S = 10.0


class Watcher(Loop):
    """Looks every second. What may block, as a disk of a network does that hangs, has one of its own."""

    def __init__(self, kind: str, look: Callable[[], object]) -> None:
        super().__init__(kind, self._wait_and_look)
        self._look = look

    def _wait_and_look(self) -> bool:
        if self.ending.wait(LOOK_EVERY_S):
            return False
        self._look()
        return True


class Watched:
    """What is stale by time, not by what a look raises: there are looks that never end."""

    def __init__(self, option: str) -> None:
        self._option = option
        #: When a look ended well; never and always are infinite.
        self._good_at = math.inf
        self._said_stale = False

    @property
    def is_stale(self) -> bool:
        """Whether what is in force may not be what lies there now."""
        return monotonic() - self._good_at > STALE_S

    def say_if_stale(self) -> None:
        """Says once that it is, and once that it is no more. For another thread than the one that looks."""
        if self.is_stale is not self._said_stale:
            self._said_stale = self.is_stale
            stays = f"no look has ended well for {STALE_S:g} s; what it held before stays in force: is its disk away?"
            _log.warning(
                "%s: %s", self._option, stays if self._said_stale else "it is looked at again"
            )


class WatchedFiles(Watched, Generic[T]):
    """What some files hold together. Where they change into what cannot be used, the former content stays in force."""

    def __init__(self, option: str, files: Sequence[Path], read: Callable[[], T]) -> None:
        """``read`` reads and checks all of ``files``, and raises ``ConfigError``, as this does; ``option`` names
        them."""
        super().__init__(option)
        self.files, self._read = files, read
        # Taken before they are read: a change meanwhile is one that the next look finds.
        self._seen = self._signature()
        #: In force.
        self.content = read()
        if files:
            self._good_at = monotonic()

    def look(self) -> bool:
        """Whether the files have changed, and what they hold now is in force. Says once for each change that it is
        not. To be called by one thread."""
        seen, self._seen = self._seen, self._signature()
        has_changed = seen != self._seen
        if has_changed:
            try:
                self.content = self._read()
            except Exception as error:  # whatever it is: who looks goes on looking
                self._good_at, self._said_stale = -math.inf, True
                _log.error(
                    "%s changed and cannot be used, so what it held before stays in force: %s",
                    self._option,
                    error,
                )
                return False
            self._said_stale = False
            _log.info("%s changed; what it holds now is in force", self._option)
        if has_changed or not math.isinf(self._good_at):
            self._good_at = monotonic()
        return has_changed

    def _signature(self) -> list[tuple[int, ...]]:
        return [_signature_of(file) for file in self.files]


def _signature_of(file: Path) -> tuple[int, ...]:
    """Another one whenever a file is written, replaced, or is not to be read by the same people any more."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

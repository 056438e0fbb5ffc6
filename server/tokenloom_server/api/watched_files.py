"""Files that are read again when they change, as a whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """What some files hold together. Where they change into what cannot be used, the former content stays in force."""

    def __init__(self, option: str, files: Sequence[Path], read: Callable[[], T]) -> None:
        """``read`` reads and checks all of ``files``, and raises ``ConfigError``, as this does; ``option`` names
        them."""
        self._option, self.files, self._read = option, files, read
        # Taken before they are read: a change meanwhile is one that the next look finds.
        self._seen = self._signature()
        #: In force.
        self.content = read()
        #: Whether the files, as they are now, cannot be used.
        self.is_stale = False

    def look(self) -> bool:
        """Whether the files have changed, and what they hold now is in force. Says once for each change that it is
        not. To be called by one thread."""
        signature = self._signature()
        if signature == self._seen:
            return False
        self._seen = signature
        try:
            self.content = self._read()
        except Exception as error:  # whatever it is: who looks goes on looking
            self.is_stale = True
            _log.error("%s changed and cannot be used, so what it held before stays in force: %s", self._option, error)
            return False
        self.is_stale = False
        _log.info("%s changed; what it holds now is in force", self._option)
        return True

    def _signature(self) -> list[tuple[int, ...]]:
        return [_signature_of(file) for file in self.files]


def _signature_of(file: Path) -> tuple[int, ...]:
    """Another one whenever a file is written, replaced, or is not to be read by the same people any more."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

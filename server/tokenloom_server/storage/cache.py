"""Blocks of remote objects on a local disk, for later epochs, restarts and other servers.

A file for each block, written whole or not at all, which begins with a checksum of the block and of its name. The name
comes from the object's URL, size and signature, so an object that changed has no blocks here. A file's modification
time says when it was last used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import xxhash

from tokenloom_server.errors import ConfigError
from tokenloom_server.storage.file import replaced

_log = logging.getLogger(__name__)

#: Where the cache lies, and how large it may become, such as ``500G``.
FOLDER, SIZE = "TOKENLOOM_CACHE", "TOKENLOOM_CACHE_SIZE"

#: What is kept, and removed, as one. Whole blocks are fetched around what is asked for.
BLOCK_BYTES = 1 << 20
#: A read of no more than so much, such as of a header, is looked up, but keeps nothing: what lies around it is mostly
#: not read.
SMALL_BYTES = 64 << 10
#: So many times while as much as the cache holds is written, it is looked through, and that part of it is made free.
_SWEEPS = 32
_CHECKSUM_BYTES = 16


class BlockCache:
    """A folder of blocks, which several processes may share. Thread-safe."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        # One of its own: whatever is in it may be removed.
        self._folder = folder / "tokenloom-blocks"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # It may be full from before.
        self._unswept_bytes = max_bytes
        self._warned = False
        #: Bytes of blocks that were here, and of those that were fetched.
        self.cached_bytes = self.fetched_bytes = 0

    def read(
        self, identity: str, size: int, begin: int, end: int, fetch: Callable[[int, int], bytes]
    ) -> bytes:
        """Bytes [begin, end) of an object of ``size`` bytes; none where ``fetch``, which reads of it what is not here,
        gives another number of bytes than it is asked for. Raises what ``fetch`` raises."""
        name = xxhash.xxh3_128_hexdigest(identity.encode())
        numbers = range(begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1)
        paths = [self._folder / name[:2] / f"{name}-{number}" for number in numbers]
        blocks = [self._load(path) for path in paths]
        missing = [number for number, block in zip(numbers, blocks, strict=True) if not block]
        with self._lock:
            self.cached_bytes += sum(map(len, blocks))
        if missing:
            # One request, also for blocks in between that are here.
            start, stop = missing[0] * BLOCK_BYTES, min(size, (missing[-1] + 1) * BLOCK_BYTES)
            if end - begin <= min(SMALL_BYTES, stop - start - 1):
                return fetch(begin, end)
            data = memoryview(fetch(start, stop))
            with self._lock:
                self.fetched_bytes += len(data)
            if len(data) != stop - start:
                return b""
            for number in range(missing[0], missing[-1] + 1):
                block = data[number * BLOCK_BYTES - start :][:BLOCK_BYTES]
                self._store(paths[number - numbers[0]], block)
                blocks[number - numbers[0]] = block
        blocks[-1] = blocks[-1][: end - numbers[-1] * BLOCK_BYTES]
        blocks[0] = blocks[0][begin - numbers[0] * BLOCK_BYTES :]
        return b"".join(blocks)

    def _load(self, path: Path) -> memoryview:
        """A block; nothing where it is not here, cannot be read, or is damaged."""
        with contextlib.suppress(OSError):
            data = memoryview(path.read_bytes())
            if data[:_CHECKSUM_BYTES] == _checksum(path.name, data[_CHECKSUM_BYTES:]):
                os.utime(path)
                return data[_CHECKSUM_BYTES:]
            _log.warning("%s is damaged; what it held is fetched again", path)
        return memoryview(b"")

    def _store(self, path: Path, block: memoryview) -> None:
        try:
            with replaced(path) as file:
                file.write(_checksum(path.name, block))
                file.write(block)
            self._make_room(len(block))
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s: %s; what cannot be kept there is fetched each time", self._folder, error
                )

    def _make_room(self, length: int) -> None:
        """Now and then removes the blocks that were not used for longest. ``length``: what was written just now."""
        with self._lock:
            self._unswept_bytes += length
            if self._unswept_bytes < self._max_bytes // _SWEEPS:
                return
            self._unswept_bytes = 0
        files = []
        for path in self._folder.glob("*/*"):
            # Another process may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        excess = sum(size for _, size, _ in files) - self._max_bytes + self._max_bytes // _SWEEPS
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


@functools.cache
def block_cache() -> BlockCache | None:
    """This process's cache, as the environment has it; None where it has none. Raises ``ConfigError``."""
    folder, named_size = os.environ.get(FOLDER), os.environ.get(SIZE)
    if not folder and named_size:
        raise ConfigError(f"{SIZE}: is {named_size!r}, but there is no --cache; give it a folder")
    if not folder:
        return None
    size = named_size or "100G"
    if not re.fullmatch(r"[1-9]\d*[MGT]", size):
        raise ConfigError(
            f"{SIZE}: found {size!r}, expected a whole number of M, G or T, such as 500G"
        )
    return BlockCache(Path(folder), int(size[:-1]) * 1000 ** (2 + "MGT".index(size[-1])))


def _checksum(name: str, block: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(block, seed=xxhash.xxh3_64_intdigest(name.encode()))

"""Files of a source: their fingerprint, and the check that the one on disk is the one of the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import xxhash

from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.sources.base import Shard
from tokenloom_server.spec import Spec

#: How much of a file's head, and of its end, goes into its fingerprint.
FINGERPRINT_BYTES = 64 * 1024

#: Threads that stat and read heads: storage latency is what 10,000 files cost, not CPU time.
FILE_THREADS = 16

REMEDY = "put the file back as it was, or begin a new run with another name"

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def fingerprint(path: Path) -> str:
    """A hash of a file's size, first 64 KiB and last 64 KiB; the modification time has no part in it.

    Raises ``OSError``.
    """
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
        file.seek(0)
        digest.update(_up_to(file.read, FINGERPRINT_BYTES))
        file.seek(max(0, size - FINGERPRINT_BYTES))
        digest.update(_up_to(file.read, FINGERPRINT_BYTES))
    return f"xxh3:{digest.hexdigest()}"


def _up_to(read: Callable[[int], bytes | None], wanted: int) -> bytes:
    # One unbuffered read may return less than was asked for, on network file systems above all.
    parts = []
    while wanted and (part := read(wanted)):
        parts.append(part)
        wanted -= len(part)
    return b"".join(parts)


def shards_of(spec: Spec, paths: Iterable[str], base_dir: Path) -> tuple[Shard, ...]:
    """The shards that lie at ``paths`` now, in that order. Raises ``SourceError`` naming an unreadable file."""

    def shard_of(path: str) -> Shard:
        try:
            local = base_dir / path
            return Shard(path, local.stat().st_size, fingerprint(local))
        except OSError as error:
            raise SourceError(f"source {str(spec)!r}: {path!r} cannot be read ({error.strerror or error})") from None

    return tuple(in_threads(shard_of, paths))


def in_threads(work: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """``map`` over some threads; results, and the error that is raised, follow the order of the items."""
    with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="files") as pool:
        return list(pool.map(work, items))


def difference(shard: Shard, base_dir: Path, *, content: bool = True) -> str | None:
    """How the file on disk differs from the shard, or ``None``; found and expected are both named.

    ``content=False`` compares the size alone, which costs one ``stat``.
    """
    local = base_dir / shard.path
    try:
        size = local.stat().st_size
    except FileNotFoundError:
        return f"{shard.path!r} is missing (expected {shard.size} bytes at {str(local)!r})"
    except OSError as error:
        return f"{shard.path!r} cannot be read ({error.strerror or error})"
    if size != shard.size:
        verb = "was shortened" if size < shard.size else "has grown"
        return f"{shard.path!r} {verb}: found {size} bytes, expected {shard.size}"
    if not content:
        return None
    try:
        found = fingerprint(local)
    except OSError as error:
        return f"{shard.path!r} cannot be read ({error.strerror or error})"
    if found != shard.fingerprint:
        return f"{shard.path!r} has other content: found fingerprint {found}, expected {shard.fingerprint}"
    return None


def where(spec: Spec, shard: Shard) -> str:
    """How messages name a shard: by its source and its path."""
    return f"source {str(spec)!r}: {shard.path!r}"


def present(spec: Spec, shard: Shard, base_dir: Path) -> Path:
    """Where a shard lies, for opening it. Raises ``SourceChanged`` when it is missing or of another size."""
    found = difference(shard, base_dir, content=False)
    if found is not None:
        raise SourceChanged(f"source {str(spec)!r}: {found}; {REMEDY}")
    return base_dir / shard.path


def order_warning(spec: Spec, shards: tuple[Shard, ...]) -> str | None:
    """What a caller should log about a source that is not shuffled, whose shards are read one behind the other."""
    if len(shards) < 2:
        return None
    return (
        f"source {str(spec)!r}: its {len(shards)} shards are read in file order; "
        "where documents should be mixed across files, set shuffle: rows (or shards) on the source"
    )

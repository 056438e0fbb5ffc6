"""Files of a source: their fingerprint, and the check that the one on disk is the one of the manifest."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import xxhash
from tokenloom_proto.threads import pool

from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import SourceChanged, SourceError, StorageError, TokenloomError, reason
from tokenloom_server.sources.base import Shard
from tokenloom_server.storage.file import (
    POINTER_BYTES,
    File,
    LocalFile,
    pointer_fault,
    pointer_fault_at,
)
from tokenloom_server.storage.hub_repository import is_hub
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import REMEDY, Entry, RemoteFile, open_file, stat
from tokenloom_server.storage.urls import is_remote

# Endings of file names: the kind of content, and after it the compression.


#: The ending of each compression, and its name.
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}


def codec_of(path: str) -> str | None:
    """The compression of a file by its name; None where it has none."""
    return CODECS.get("".join(path.lower().rpartition(".")[1:]))


def ending_of(name: str) -> str:
    """What the name of a file ends with: ``.jsonl``, or ``.jsonl.gz`` where it is compressed."""
    path = Path(name)
    return f"{Path(path.stem).suffix}{path.suffix}" if codec_of(name) is not None else path.suffix


#: How much of a file's head, and of its end, goes into its fingerprint.
FINGERPRINT_BYTES = 64 * 1024

#: So many ranges of a file are in its spot digest at most, and of all files of a run together (256 MiB); but one of
#: each.
SPOTS, ALL_SPOTS = 64, 4096
SPOT_BYTES = 64 * 1024

#: Threads that stat and read heads: storage latency is what 10,000 files cost, not CPU time.
FILE_THREADS = 16
#: The same where each answer takes round trips over a network.
REMOTE_THREADS = 64

#: Files that such a thread takes at once, at most.
MOST_AT_ONCE = 64

#: What a fingerprint begins with that is made of a file's content.
HASH = "xxh3"

#: The number of a file in a series, of so many; what comes after it may be a hash of the file.
_IN_SERIES = re.compile(r"(\d+)([-_.]of[-_.](\d+))")

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def fingerprint_of(file: File) -> str:
    """A hash of a file's size, first 64 KiB and last 64 KiB; the modification time has no part in it."""
    digest, is_small = (
        xxhash.xxh3_128(file.size.to_bytes(8, "little")),
        file.size <= FINGERPRINT_BYTES,
    )
    head = file.read_at(0, FINGERPRINT_BYTES)
    digest.update(head)
    digest.update(
        head if is_small else file.read_at(file.size - FINGERPRINT_BYTES, FINGERPRINT_BYTES)
    )
    return f"{HASH}:{digest.hexdigest()}"


def spot_digest(file: File, count: int) -> str:
    """``COUNT:DIGEST``, an XXH3-128 of so many ranges of 64 KiB, one drawn by a hash in each equal part of the file; of
    the whole file where the parts are no larger than that."""
    digest = xxhash.xxh3_128()
    for i in range(count):
        begin, end = file.size * i // count, file.size * (i + 1) // count
        drawn = xxhash.xxh3_64_intdigest(b"%d %d %d" % (file.size, count, i)) % max(
            1, end - begin - SPOT_BYTES + 1
        )
        digest.update(file.read_at(begin + drawn, min(SPOT_BYTES, end - begin)))
    return f"{count}:{digest.hexdigest()}"


def with_spots(shards: Sequence[Shard], base_dir: Path, sources: int) -> tuple[Shard, ...]:
    """A new run's shards of one of so many sources, those with spots that are local and larger than what the
    fingerprint sees. Raises ``OSError``."""
    most = max(1, min(SPOTS, ALL_SPOTS // max(1, len(shards) * sources)))

    def spotted(shard: Shard) -> Shard:
        is_large = (
            shard.size > 2 * FINGERPRINT_BYTES and _is_hashed(shard) and not is_remote(shard.path)
        )
        if not is_large or not (base_dir / shard.path).is_file():
            return shard  # a plugin's shards may be something else than files
        with LocalFile(base_dir / shard.path, shard.path) as file:
            digest = spot_digest(file, min(most, -(-shard.size // SPOT_BYTES)))
            return replace(shard, spots=f"{file.modified_ns}:{digest}")

    return tuple(in_threads(spotted, shards))


def spots_differ(shard: Shard, file: File) -> str | None:
    """As ``difference``, of what the fingerprint does not see; None where no spots were recorded."""
    recorded = shard.spots.partition(":")[2]
    actual = spot_digest(file, int(recorded.partition(":")[0])) if recorded else ""
    if actual == recorded:
        return None
    name = f"{shard.path!r} was changed within, though size, head and end are as they were"
    return f"{name}: found spot digest {actual}, recorded {recorded}"


def shards_of(spec: Spec, paths: Iterable[str], base_dir: Path) -> tuple[Shard, ...]:
    """The local files that lie at ``paths`` now, in that order. Raises ``SourceError`` naming an unreadable one."""

    def shard_of(path: str) -> Shard:
        name = f"source {str(spec)!r}: {path!r}"
        try:
            with open_file(path, base_dir, name) as file:
                refuse_pointer(file)
                return Shard(path, file.size, fingerprint_of(file))
        except OSError as error:
            fault = pointer_fault_at(base_dir / path) or f"cannot be read ({reason(error)})"
            raise SourceError(f"{name} {fault}") from None

    return tuple(in_threads(shard_of, paths))


def shard_at(spec: Spec, entry: Entry) -> Shard:
    """The shard of a remote file: by the signature that its storage gives, or else by its head and end.

    Raises ``SourceError``.
    """
    if entry.signature and entry.size > POINTER_BYTES:
        return Shard(entry.path, entry.size, entry.signature)
    with open_file(entry.path, Path(), f"source {str(spec)!r}: {entry.path!r}") as file:
        refuse_pointer(file)
        return Shard(entry.path, entry.size, entry.signature or fingerprint_of(file))


def refuse_pointer(file: File) -> None:
    """Raises ``SourceError`` for a file that only points to data, as Git has it in their place until they are asked
    for."""
    if file.size <= POINTER_BYTES and (fault := pointer_fault(bytes(file.read_at(0, file.size)))):
        raise SourceError(f"{file.name} {fault}")


def gap_warning(source: str, shards: Iterable[Shard]) -> str:
    """What to say of files that are missing in series such as ``web-00002-of-00005``; or nothing."""
    there: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for path in (shard.path for shard in shards):
        for number in _IN_SERIES.finditer(path):
            kind, end = (
                ("folders", "/") if "/" in path[number.end() :] else ("files", Path(path).suffix)
            )
            name = f"{kind} {f'{path[: number.start()]}…{number[2]}{end}'!r}"
            there[name, int(number[3])].add(int(number[1]))
    gaps = {key: key[1] - len(numbers) for key, numbers in there.items() if len(numbers) < key[1]}
    listed = ", ".join(
        f"{missing:,} of the {total:,} {name}" for (name, total), missing in gaps.items()
    )
    return listed and f"source {source!r}: {listed[:500]} are not there; the others are read"


def in_threads(
    work: Callable[[_In], _Out], items: Iterable[_In], *, remote: bool = False
) -> list[_Out]:
    """``map`` over some threads; results, and the error that is raised, follow the order of the items. ``remote``: for
    each a network is waited for."""
    items, count = list(items), REMOTE_THREADS if remote else FILE_THREADS
    # Some at once, where each thread has many: to hand one over costs more than what a local file is asked for.
    at_once = min(MOST_AT_ONCE, 1 + len(items) // (32 * count))
    parts = (items[i : i + at_once] for i in range(0, len(items), at_once))
    with pool(count, "files") as threads:
        try:
            return list(chain.from_iterable(threads.map(lambda part: list(map(work, part)), parts)))
        except BaseException:
            # Nobody waits for the thousands after the one that failed.
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def difference(shard: Shard, base_dir: Path, listed: Entry | None = None) -> str | None:
    """How the file that is there now differs from the shard, or ``None``; found and expected are both named.

    ``listed``: what a listing just said of it, if it is remote. Raises ``StorageError`` where it cannot be looked at.
    """
    if is_hub(shard.path):
        return None  # at a commit nothing changes, and each opening is held to the fingerprint
    try:
        if is_remote(shard.path):
            entry = listed or stat(shard.path, repr(shard.path), IoStats())
            fault = _sizes_differ(shard, entry.size) or _signatures_differ(shard, entry)
            if fault is not None or not _is_hashed(shard):
                return fault
        with open_file(shard.path, base_dir) as file:
            return _sizes_differ(shard, file.size) or _fingerprints_differ(
                shard, fingerprint_of(file)
            )
    except (FileNotFoundError, NotADirectoryError):
        return _missing(shard, base_dir)
    except OSError as error:
        raise refused(repr(shard.path), error) or error from None


def _missing(shard: Shard, base_dir: Path) -> str:
    place = shard.path if is_remote(shard.path) else str(base_dir / shard.path)
    return f"{shard.path!r} is missing (expected {shard.size} bytes at {place!r})"


def _sizes_differ(shard: Shard, size: int) -> str | None:
    if size == shard.size:
        return None
    verb = "was shortened" if size < shard.size else "has grown"
    return f"{shard.path!r} {verb}: found {size} bytes, expected {shard.size}"


def _signatures_differ(shard: Shard, entry: Entry) -> str | None:
    kind = shard.fingerprint.partition(":")[0]
    return None if kind == HASH else _fingerprints_differ(shard, entry.signed(kind) or f"no {kind}")


def _fingerprints_differ(shard: Shard, fingerprint: str) -> str | None:
    if fingerprint == shard.fingerprint:
        return None
    return f"{shard.path!r} has other content: found fingerprint {fingerprint}, expected {shard.fingerprint}"


def refused(where: str, error: Exception) -> StorageError | None:
    """The error to raise where Arrow failed at the operating system; None where it failed at the file's content."""
    if not isinstance(error, OSError) or error.errno is None:
        return None
    said, remedy = os.strerror(error.errno), "look at the disk or mount"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = (
            "this process may not open as many: raise the limit (ulimit -n), or name fewer sources"
        )
    if isinstance(error, PermissionError):
        said, remedy = reason(error), "let this process read it"
    return StorageError(
        f"{where} cannot be read ({said}); {remedy}, and start again: nothing is lost"
    )


def unreadable(where: str, kind: str, error: Exception, place: str = "") -> TokenloomError:
    """The error to raise where a file does not open as one of its kind, or ends at a ``place`` in it."""
    return refused(where, error) or SourceError(
        f"{where} is not a readable {kind} file ({place}{error}); {fault_of(error)}"
    )


def fault_of(error: Exception) -> str:
    """What is wrong with a file at which Arrow failed so, and what to do."""
    if "crypt" in str(error):
        return "it is encrypted, and there are no keys for it here: write it without encryption"
    if isinstance(error, NotImplementedError):
        return "it has something that this release of Arrow does not read: write it anew in a more common way"
    return "it is truncated or damaged: write or copy it again"


def where(spec: Spec, shard: Shard) -> str:
    """How messages name a shard: by its source and its path."""
    return f"source {str(spec)!r}: {shard.path!r}"


def open_shard(spec: Spec, shard: Shard, base_dir: Path, io_stats: IoStats | None = None) -> File:
    """Opens a shard. Raises ``SourceChanged`` where it is missing, of another size, signed otherwise (remote), or
    (local) was written since ``io_stats`` first saw it and has another fingerprint; and ``StorageError``."""
    try:
        file = open_file(shard.path, base_dir, where(spec, shard), io_stats)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceChanged(
            f"source {str(spec)!r}: {_missing(shard, base_dir)}; {REMEDY}"
        ) from None
    except OSError as error:
        raise refused(where(spec, shard), error) or error from None
    fault = _sizes_differ(shard, file.size)
    if fault is None and isinstance(file, RemoteFile):
        fault = _signatures_differ(shard, file.entry)
    if fault is None and io_stats is not None and isinstance(file, LocalFile):
        fault = _written_since(shard, file, io_stats)
    if fault is not None:
        file.close()
        raise SourceChanged(f"source {str(spec)!r}: {fault}; {REMEDY}")
    return file


def _written_since(shard: Shard, file: LocalFile, io_stats: IoStats) -> str | None:
    """``difference`` of a file that was written since it was first opened: a run may go on for weeks, and only its
    beginning compares all files."""
    name, modified, recorded = file.path, file.modified_ns, int(shard.spots.partition(":")[0] or 0)
    # Files in the Hub's cache have another kind of fingerprint, and never change.
    if (
        not _is_hashed(shard)
        or io_stats.modified.setdefault(name, recorded or modified) == modified
    ):
        return None
    fault = _fingerprints_differ(shard, fingerprint_of(file)) or spots_differ(shard, file)
    if fault is None:
        io_stats.modified[name] = modified
        if recorded not in (0, modified):
            io_stats.warn_of(shard.path)
    return fault


def _is_hashed(shard: Shard) -> bool:
    """Whether the fingerprint is made of the file's content."""
    return shard.fingerprint.startswith(f"{HASH}:")


def reported(
    work: Callable[[_In], _Out], report: Callable[[int], None], interval_s: float
) -> Callable[[_In], _Out]:
    """The same work, to be done for many files in threads: ``report`` gets how many are done by now, after so many
    seconds and again after each further."""
    lock, done, next_report_s = threading.Lock(), 0, time.monotonic() + interval_s

    def work_and_report(item: _In) -> _Out:
        nonlocal done, next_report_s
        result = work(item)
        with lock:
            done += 1
            if time.monotonic() >= next_report_s:
                next_report_s += interval_s
                report(done)
        return result

    return work_and_report

"""Files at URLs, read by ranges through fsspec's file system for their protocol; a file wherever it is, opened."""

from __future__ import annotations

import copy
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tokenloom_server.errors import ConfigError, SourceChanged, SourceError, TokenloomError
from tokenloom_server.storage.cache import BLOCK_BYTES as CACHED_BYTES
from tokenloom_server.storage.cache import block_cache
from tokenloom_server.storage.file import File, LocalFile, Range
from tokenloom_server.storage.hedged_read import HedgedRead, is_refused, reason_of, refused
from tokenloom_server.storage.hub_repository import HubFiles, is_hub
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.urls import is_remote, protocol, redacted, root

# Bytes that will be read, fetched before they are asked for.


#: The first block that is read ahead, and the largest: each is twice as long as the one before.
FIRST_BLOCK_BYTES, BLOCK_BYTES = 1 << 20, 8 << 20
#: Ranges with no more than so much between them are read as one: a round trip costs as much as these bytes.
GAP_BYTES = 256 << 10
#: Blocks of one file under way or waiting to be read.
DEPTH = 4


class _Block(NamedTuple):
    begin: int
    end: int
    fetch: HedgedRead[bytes]


class Prefetcher:
    """Blocks of the ranges that will be read of a file. For one thread.

    The memory is shared by all readers of a run (``io_stats.AHEAD_BYTES``): where none is left, nothing is fetched.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], HedgedRead[bytes]],
        size: int,
        ranges: Iterable[Range],
        io_stats: IoStats,
    ) -> None:
        """``fetch`` begins to read from an offset, so many bytes; the file has ``size``."""
        self._fetch = fetch
        self._io_stats = io_stats
        self._ranges = _joined(Range(max(0, each.begin), min(each.end, size)) for each in ranges)
        self._range = Range(0, 0)
        self._blocks: deque[_Block] = deque()
        self._next_bytes = FIRST_BLOCK_BYTES
        # The ranges may be found by reading of the same file.
        self._looking = False

    def read(self, begin: int, end: int) -> memoryview | None:
        """Bytes from ``begin`` on, up to ``end`` at most; None where these are not, or no longer, among what is read
        ahead."""
        if self._looking:
            return None
        if not self._blocks:
            self._fetch_ahead(begin)
        passed = next(
            (i for i, block in enumerate(self._blocks) if block.begin <= begin < block.end), None
        )
        if passed is None:
            return None
        for _ in range(passed):
            self._drop()
        block = self._blocks[0]
        data = memoryview(block.fetch.result())[begin - block.begin : end - block.begin]
        if begin + len(data) == block.end:
            self._drop()
        self._fetch_ahead()
        return data

    def close(self) -> None:
        while self._blocks:
            self._drop()

    def _drop(self) -> None:
        block = self._blocks.popleft()
        self._io_stats.release(block.end - block.begin)

    def _fetch_ahead(self, begin: int | None = None) -> None:
        """``begin``: where reading goes on, if it lies within the range: what is before it is not wanted."""
        while len(self._blocks) < DEPTH:
            if self._range.begin >= self._range.end:
                self._looking = True
                try:
                    following = next(self._ranges, None)
                finally:
                    self._looking = False
                if following is None:
                    return
                self._range = following
            if begin is not None:
                if not self._range.begin <= begin < self._range.end:
                    return
                self._range, begin = Range(begin, self._range.end), None
            start = self._range.begin
            # To the nearest end of a block of the cache, so that no two reads have one in common.
            end = (start + self._next_bytes + CACHED_BYTES // 2) // CACHED_BYTES * CACHED_BYTES
            end = min(end, self._range.end)
            if not self._io_stats.reserve(end - start):
                return
            self._blocks.append(_Block(start, end, self._fetch(start, end - start)))
            self._range = Range(end, self._range.end)
            self._next_bytes = min(2 * self._next_bytes, BLOCK_BYTES)


def _joined(ranges: Iterable[Range]) -> Iterator[Range]:
    held: Range | None = None
    for each in ranges:
        if held is not None and held.begin <= each.begin <= held.end + GAP_BYTES:
            held = Range(held.begin, max(held.end, each.end))
            continue
        if held is not None:
            yield held
        held = each
    if held is not None:
        yield held


#: A read of less fetches so much: headers lie close together, and a round trip costs more than its bytes.
NEAR_BYTES = 64 << 10
REMEDY = "put the file back as it was, or begin a new run with another name"
S3_PROTOCOLS = ("s3", "s3a")
#: What to install, by protocol; others name their package themselves.
_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
} | dict.fromkeys(S3_PROTOCOLS, "tokenloom[s3]")
#: As many connections as there are threads that read; the library's own limit is ten. And it is to say soon what it
#: met: who asks tries again, and says why.
_S3_OPTIONS: Mapping[str, Any] = {
    "config_kwargs": {"max_pool_connections": 64, "retries": {"total_max_attempts": 3}},
}
#: What storage says of an object's content, best first: the kind of signature, and its keys in fsspec's description.
_SIGNATURES = {
    "sha256": ("sha256",),
    "etag": ("etag", "e_tag"),
    "md5": ("md5hash", "md5"),
    "generation": ("generation",),
    "blob": ("blob_id",),
    "version": ("version_id", "versionid"),
    "modified": ("lastmodified", "last_modified", "mtime", "updated", "created"),
}
_T = TypeVar("_T")


class Entry(NamedTuple):
    """A file as its storage describes it. Each of the ``signatures`` changes with its content; the best comes first."""

    path: str
    size: int
    signatures: tuple[str, ...]

    @property
    def signature(self) -> str:
        """The signature of this content; empty where the storage has none."""
        return self.signatures[0] if self.signatures else ""

    def signed(self, kind: str) -> str:
        """The signature of a kind (``etag`` of ``etag:…``), or an empty string."""
        return next(
            (signature for signature in self.signatures if signature.partition(":")[0] == kind), ""
        )


@functools.cache
def filesystem(place: str) -> Any:
    """fsspec's file system for a protocol and host (``s3://bucket``): one connection pool for all that read from it.

    Credentials and end points come from the environment alone. Raises ``ConfigError`` for an unknown protocol, and for
    a package that is not installed.
    """
    scheme = protocol(place)
    if scheme == "hf":
        return HubFiles()
    install = _PACKAGES.get(scheme, f"the package that fsspec reads {scheme}:// with")
    try:
        import fsspec.core
    except ImportError:
        raise ConfigError(f"{place}: to read URLs, install {install} (fsspec is missing)") from None
    options = _S3_OPTIONS if scheme in S3_PROTOCOLS else {}
    try:
        # fsspec would give one of before, with the credentials that there were.
        opened, _ = fsspec.core.url_to_fs(
            place, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ImportError as error:
        raise ConfigError(
            f"{place}: to read such URLs, install {install} ({redacted(str(error))})"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{place}: this is storage that fsspec cannot read ({redacted(str(error))})"
        ) from None
    return opened


def asked(
    place: str, ask: Callable[[Any], _T], name: str, io_stats: IoStats, length: int = 0
) -> HedgedRead[_T]:
    """What ``ask`` gets of a place's file system. A refusal counts only if it comes again with credentials that were
    read anew."""

    def attempt() -> _T:
        files = filesystem(place)
        try:
            return ask(files)
        except Exception as error:
            if is_refused(reason_of(error)):
                return ask(_renewed(place, files))
            if not getattr(files, "async_impl", False):
                _renewed(
                    place, files
                )  # it holds one connection, of SSH for example, which may be gone
            raise

    return HedgedRead(attempt, name, io_stats, length)


def _renewed(place: str, failed: Any) -> Any:
    """Another file system than the one that failed; one for all who met that, or about one."""
    if filesystem(place) is failed:
        filesystem.cache_clear()
    return filesystem(place)


def cached_copy(url: str) -> Path | None:
    """Where a file lies on this machine already: one of the Hub may have been downloaded."""
    if protocol(url) != "hf":
        return None
    hub: HubFiles = filesystem(root(url))
    return hub.cached(url)


def path_of(place: str) -> str:
    """A place as fsspec names it within its storage."""
    from fsspec.core import strip_protocol

    return str(strip_protocol(place))


def entry_of(place: str, info: Mapping[str, Any]) -> Entry:
    """An entry from fsspec's description of a file. Raises ``SourceError`` where the storage does not know its size."""
    name = str(info["name"])
    if "://" not in name:
        # fsspec drops the protocol, and of some protocols the host.
        base = path_of(place).strip("/")
        name = f"{place}/{name.strip('/').removeprefix(base).lstrip('/')}"
    if info.get("size") is None:
        raise SourceError(
            f"{name!r}: its storage does not say how long it is, so it cannot be read by ranges"
        )
    return Entry(name, int(info["size"]), tuple(_signatures(info)))


def _signatures(info: Mapping[str, Any]) -> Iterator[str]:
    known = {key.lower(): value for key, value in info.items()}
    for kind, keys in _SIGNATURES.items():
        value = next((known[key] for key in keys if known.get(key) not in (None, "")), None)
        if value is None:
            continue
        if isinstance(value, datetime):
            value = value.timestamp()
        # An ETag comes in quotation marks, and a time as often with as without its fraction.
        yield (
            f"{kind}:{value:.6f}"
            if isinstance(value, float)
            else f"{kind}:{str(value).strip(chr(34))}"
        )


def stat(url: str, name: str, io_stats: IoStats) -> Entry:
    """What storage says of a file now. Raises what ``HedgedRead.result`` does."""
    info = asked(root(url), lambda files: files.info(url), name, io_stats).result()
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{url} is a folder")
    return _entry_at(url, info)


def _entry_at(url: str, info: Mapping[str, Any]) -> Entry:
    return entry_of(root(url), info)._replace(path=url)


class RemoteFile(File):
    """An object, read by range requests that storage may answer late, twice, or not at all."""

    def __init__(self, url: str, name: str, io_stats: IoStats) -> None:
        """Asks for its size and signature. Raises what ``HedgedRead.result`` does."""
        self.name = name
        self.url = url
        self._io_stats = io_stats
        self._open = asked(root(url), lambda files: _opened(files, url), name, io_stats).result()
        self.entry = self._open.entry
        self.size = self.entry.size
        # The last short reads, with what lies around them: a file's end, and wherever headers are read.
        self._near: tuple[tuple[int, bytes], ...] = ()
        self._ahead: Prefetcher | None = None

    def again(self) -> RemoteFile:
        """The same file for another reader, with what was read of its head and end; nothing is asked for."""
        other = copy.copy(self)
        other._ahead = None
        return other

    def plan(self, ranges: Iterable[Range]) -> None:
        self.close()
        if self._io_stats.sparing:
            return
        self._ahead = Prefetcher(self._fetch, self.size, ranges, self._io_stats)

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        end = min(offset + length, self.size)
        parts: list[bytes | memoryview] = []
        while offset < end:
            data = self._known(offset, end)
            if data is None and self._ahead is not None:
                data = self._ahead.read(offset, end)
            parts.append(data if data is not None else self._directly(offset, end - offset))
            offset += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _known(self, begin: int, end: int) -> memoryview | None:
        for start, data in self._near:
            if start <= begin and end <= start + len(data):
                return memoryview(data)[begin - start : end - start]
        return None

    def _directly(self, offset: int, length: int) -> bytes | memoryview:
        if self._io_stats.sparing:
            length = min(length, NEAR_BYTES)
        if length > NEAR_BYTES:
            return self._fetch(offset, length).result()
        start = max(0, min(offset, self.size - NEAR_BYTES))
        data = self._fetch(start, min(NEAR_BYTES, self.size - start)).result()
        self._near = (*self._near[-1:], (start, data))
        return memoryview(data)[offset - start : offset - start + length]

    def _fetch(self, offset: int, length: int) -> HedgedRead[bytes]:
        return asked(
            root(self.url),
            lambda files: self._read(files, offset, length),
            self.name,
            self._io_stats,
            length,
        )

    def _read(self, files: Any, offset: int, length: int) -> bytes:
        cache = None if self._io_stats.sparing else block_cache()
        fetch = functools.partial(self._range, files)
        try:
            if cache is not None and self.entry.signature:
                identity = f"{self.url}\n{self.size}\n{self.entry.signature}"
                data = cache.read(identity, self.size, offset, offset + length, fetch)
            else:
                data = fetch(offset, offset + length)
        except TokenloomError:
            raise
        except Exception as error:
            # If the object was replaced, that is the error to report, and a retry would not help.
            self._refuse_changed(files)
            if isinstance(reason_of(error), FileNotFoundError):
                raise refused(self.name, error) from error
            raise
        if len(data) != length:
            self._refuse_changed(files)
            raise OSError(f"{len(data)} bytes came where {length} were asked for")
        return data

    def _range(self, files: Any, begin: int, end: int) -> bytes:
        if files is not self._open.files:
            opened = _opened(files, self.url)
            self._refuse_other(opened.entry)
            self._open = opened
        # It knows the object's version at the opening, and requests that one alone.
        fetch: Callable[[int, int], bytes] | None = getattr(self._open.handle, "_fetch_range", None)
        data: bytes = (
            files.cat_file(self.url, start=begin, end=end) if fetch is None else fetch(begin, end)
        )
        return data

    def _refuse_changed(self, files: Any) -> None:
        if is_hub(self.url):
            return  # every answer of the Hub is held to the digest already
        try:
            present = _entry_at(self.url, files.info(self.url))
        except Exception as error:
            if isinstance(reason_of(error), FileNotFoundError):
                raise SourceChanged(
                    f"{self.name} is missing: it was deleted while being read; {REMEDY}"
                ) from None
            return  # storage answers nothing just now
        self._refuse_other(present)

    def _refuse_other(self, present: Entry) -> None:
        if present != self.entry:
            raise SourceChanged(
                f"{self.name} was changed while being read: found {present.size} bytes ({present.signature}), "
                f"expected {self.size} ({self.entry.signature}); {REMEDY}"
            )

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


class _Opened(NamedTuple):
    files: Any
    handle: Any
    entry: Entry


def _opened(files: Any, url: str) -> _Opened:
    """A handle without a cache of its own, and the object's description, which opening asked for. A web server is
    asked before: its handle keeps no signature, and asks for nothing where it gets the size."""
    if protocol(url) in ("http", "https"):
        entry = _entry_at(url, files.info(url))
        handle = files.open(url, "rb", cache_type="none", size=entry.size) if entry.size else None
        return _Opened(files, handle, entry)
    handle = files.open(url, "rb", cache_type="none")
    details: Any = getattr(handle, "details", None)
    is_signed = isinstance(details, Mapping) and any(_signatures(details))
    return _Opened(files, handle, _entry_at(url, details if is_signed else files.info(url)))


def open_file(path: str, base_dir: Path, name: str = "", io_stats: IoStats | None = None) -> File:
    """Opens a file by its path (relative to ``base_dir``) or URL. ``name`` is how messages call it.

    Raises ``OSError`` (``FileNotFoundError`` among them) for a file that is not there, or on this machine may not be
    read, and ``StorageError`` where storage refuses it or does not answer.
    """
    name = name or repr(path)
    if is_remote(path):
        cached = cached_copy(path)
        return (
            RemoteFile(path, name, io_stats or IoStats())
            if cached is None
            else LocalFile(cached, name)
        )
    return LocalFile(os.path.join(base_dir, path), name)  # noqa: PTH118  # a Path for each of many files costs more

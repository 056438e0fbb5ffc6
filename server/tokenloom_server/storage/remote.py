"""Files at URLs, read by ranges through fsspec's file system for their protocol."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tokenloom_server.errors import ConfigError, SourceChanged, SourceError, TokenloomError
from tokenloom_server.storage.cache import block_cache
from tokenloom_server.storage.file import File, Range
from tokenloom_server.storage.hedged_read import HedgedRead, is_final, refused
from tokenloom_server.storage.hub.files import HubFiles, is_hub
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.prefetch import Prefetcher
from tokenloom_server.storage.urls import protocol, redacted, root

#: A read of less fetches so much: headers lie close together, and a round trip costs more than its bytes.
NEAR_BYTES = 64 << 10
REMEDY = "put the file back as it was, or begin a new run with another name"
S3_PROTOCOLS = ("s3", "s3a")
#: What to install, by protocol; others name their package themselves.
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"} | dict.fromkeys(
    S3_PROTOCOLS, "tokenloom[s3]"
)
#: As many connections as there are threads that read; the library's own limit is ten.
_S3_OPTIONS: Mapping[str, Any] = {"config_kwargs": {"max_pool_connections": 64}}
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
        return next((signature for signature in self.signatures if signature.partition(":")[0] == kind), "")


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
        opened, _ = fsspec.core.url_to_fs(place, use_listings_cache=False, **options)
    except ImportError as error:
        raise ConfigError(f"{place}: to read such URLs, install {install} ({redacted(str(error))})") from None
    except ValueError as error:
        raise ConfigError(f"{place}: this is storage that fsspec cannot read ({redacted(str(error))})") from None
    return opened


def cached_copy(url: str) -> Path | None:
    """Where a file lies on this machine already: one of the Hub may have been downloaded."""
    if protocol(url) != "hf":
        return None
    hub: HubFiles = filesystem(root(url))
    return hub.cached(url)


def entry_of(place: str, info: Mapping[str, Any]) -> Entry:
    """An entry from fsspec's description of a file. Raises ``SourceError`` where the storage does not know its size."""
    name = str(info["name"])
    if "://" not in name:
        # fsspec drops the protocol, and of some protocols the host.
        base = str(filesystem(place)._strip_protocol(place)).strip("/")
        name = f"{place}/{name.strip('/').removeprefix(base).lstrip('/')}"
    if info.get("size") is None:
        raise SourceError(f"{name!r}: its storage does not say how long it is, so it cannot be read by ranges")
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
        yield f"{kind}:{value:.6f}" if isinstance(value, float) else f"{kind}:{str(value).strip(chr(34))}"


def stat(url: str, name: str, io_stats: IoStats) -> Entry:
    """What storage says of a file now. Raises ``OSError`` (``FileNotFoundError`` among them) and ``StorageError``."""
    files = filesystem(root(url))
    info = HedgedRead(lambda: files.info(url), name, io_stats).result()
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{url} is a folder")
    return _entry_at(url, info)


def _entry_at(url: str, info: Mapping[str, Any]) -> Entry:
    return entry_of(root(url), info)._replace(path=url)


class RemoteFile(File):
    """An object, read by range requests that storage may answer late, twice, or not at all."""

    def __init__(self, url: str, name: str, io_stats: IoStats) -> None:
        """Asks for its size and signature. Raises ``OSError`` for one that is not there or may not be read."""
        self.name = name
        self.url = url
        self._io_stats = io_stats
        files = filesystem(root(url))
        handle, info = HedgedRead(lambda: _opened(files, url), name, io_stats).result()
        self.entry = _entry_at(url, info)
        self.size = self.entry.size
        self._range: Callable[[int, int], bytes] = (
            # It knows the object's version at the opening, and requests that one alone.
            handle._fetch_range
            if hasattr(handle, "_fetch_range")
            else lambda begin, end: files.cat_file(url, start=begin, end=end)
        )
        cache, fetch = block_cache(), self._range
        if cache is not None and self.entry.signature:
            identity = f"{url}\n{self.size}\n{self.entry.signature}"
            self._range = lambda begin, end: cache.read(identity, self.size, begin, end, fetch)
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
        if length >= NEAR_BYTES:
            return self._fetch(offset, length).result()
        start = max(0, min(offset, self.size - NEAR_BYTES))
        data = self._fetch(start, min(NEAR_BYTES, self.size - start)).result()
        self._near = (*self._near[-1:], (start, data))
        return memoryview(data)[offset - start : offset - start + length]

    def _fetch(self, offset: int, length: int) -> HedgedRead[bytes]:
        return HedgedRead(lambda: self._read(offset, length), self.name, self._io_stats, length)

    def _read(self, offset: int, length: int) -> bytes:
        try:
            data: bytes = self._range(offset, offset + length)
        except TokenloomError:
            raise
        except Exception as error:
            # If the object was replaced, that is the error to report, and a retry would not help.
            self._refuse_changed()
            raise refused(self.name, error) if is_final(error) else error from error
        if len(data) != length:
            self._refuse_changed()
            raise OSError(f"{len(data)} bytes came where {length} were asked for")
        return data

    def _refuse_changed(self) -> None:
        if is_hub(self.url):
            return  # every answer of the Hub is held to the digest already
        try:
            present = _entry_at(self.url, filesystem(root(self.url)).info(self.url))
        except FileNotFoundError:
            raise SourceChanged(f"{self.name} is missing: it was deleted while being read; {REMEDY}") from None
        except Exception:
            return  # storage answers nothing just now
        if present != self.entry:
            raise SourceChanged(
                f"{self.name} was changed while being read: found {present.size} bytes ({present.signature}), "
                f"expected {self.size} ({self.entry.signature}); {REMEDY}"
            )

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _opened(files: Any, url: str) -> tuple[Any, Mapping[str, Any]]:
    """A handle without a cache of its own, and the object's description, which opening asked for; for web servers the
    handle keeps no signature, so they are asked again."""
    handle = files.open(url, "rb", cache_type="none")
    details: Any = getattr(handle, "details", None)
    is_signed = isinstance(details, Mapping) and any(_signatures(details))
    return handle, details if is_signed else files.info(url)

"""Files on the Hub, as far as reading them by ranges needs: a small part of what fsspec calls a file system.

Not huggingface_hub's own ``HfFileSystem``: it lists a folder before it opens a file in it, is redirected anew for each
range, and waits out a rate limit where nobody sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.storage.hub import repository
from tokenloom_server.storage.hub.client import HubBusy, HubClient, HubRefused, Reply
from tokenloom_server.storage.hub.repository import COMMIT, HubFile

_URL = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+|[^/@]+(?=@))(@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?/(?P<path>.+)",
    re.DOTALL,
)


def is_hub(url: str) -> bool:
    """Whether a path is that of a file on the Hub."""
    return url.startswith("hf://")


@dataclass(frozen=True, slots=True)
class HubPath:
    """``hf://datasets/ORG/NAME[@REVISION]/PATH``, taken apart; manifests have a commit for a revision."""

    repo: str
    revision: str | None
    path: str

    @classmethod
    def parse(cls, url: str) -> HubPath:
        """Raises ``SourceError`` for another URL."""
        match = _URL.fullmatch(url)
        if match is None:
            raise SourceError(
                f"{url!r} names nothing in a dataset, expected hf://datasets/ORG/NAME@REVISION/PATH"
            )
        return cls(match["repo"], match["revision"], match["path"])

    @property
    def commit(self) -> str | None:
        """Its revision, where that is a commit."""
        return self.revision if COMMIT.fullmatch(self.revision or "") else None


class HubFiles:
    """What storage asks of a file system, for ``hf://``. Safe for threads."""

    def __init__(self) -> None:
        """Raises ``SourceError`` where huggingface_hub is missing."""
        self._client = HubClient()

    def cached(self, url: str) -> Path | None:
        """Where a file at a commit lies in the cache of huggingface_hub, if it does."""
        location = HubPath.parse(url)
        return (
            self._client.cached_file(location.repo, location.commit, location.path)
            if location.commit
            else None
        )

    def glob(self, pattern: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        """The files that a URL with wildcards matches, each at the commit that its revision is at now."""
        location = HubPath.parse(pattern)
        with self._naming(pattern):
            held = repository.open_repository(self._client, location.repo, location.revision)
            return {
                info["name"]: info
                for info in (_info(held, file) for file in repository.find(held, location.path))
            }

    def ls(self, url: str, detail: bool = True) -> list[dict[str, Any]]:
        """The files directly in a folder, likewise. Raises ``FileNotFoundError`` where it has none."""
        location = HubPath.parse(url)
        with self._naming(url):
            held = repository.open_repository(self._client, location.repo, location.revision)
            infos = [_info(held, file) for file in held.below(location.path.strip("/"), deep=False)]
        if not infos:
            raise FileNotFoundError(url)
        return infos

    def info(self, url: str) -> dict[str, Any]:
        """A file's size and digest; one request."""
        return self.open(url).details

    def open(self, url: str, mode: str = "rb", cache_type: str = "none") -> HubHandle:
        """Asks where it lies; one request."""
        with self._naming(url):
            return HubHandle(self._client, url)

    @staticmethod
    @contextmanager
    def _naming(url: str) -> Iterator[None]:
        try:
            yield
        except HubRefused as error:
            if error.kind == "entry":
                raise FileNotFoundError(url) from None
            raise SourceError(f"{url!r} {error}") from None


class HubHandle:
    """One opened file. Safe for threads; each read is one try, for whoever retries to decide about the next."""

    def __init__(self, client: HubClient, url: str) -> None:
        """Raises ``HubBusy`` and ``HubRefused``."""
        self._client = client
        self._url = url
        location = HubPath.parse(url)
        revision = quote(location.revision or "main", safe="")
        self._address = (
            f"{client.endpoint}/datasets/{location.repo}/resolve/{revision}/{quote(location.path)}"
        )
        with client.ask("HEAD", self._address) as reply:
            size = reply.hub.get("x-linked-size") or reply.headers.get("content-length", "")
            self._digest = _digest_of(reply)
            #: Where the Hub's answer led: an address in its storage that is signed, and good for a while.
            self._storage = None if client.is_own(reply.url) else reply.url
        if not size.isdecimal():
            raise HubRefused("other", "is of unknown size: the Hub does not say")
        self.size = int(size)
        kind, _, digest = self._digest.partition(":")
        self.details: dict[str, Any] = {
            "name": url,
            "type": "file",
            "size": self.size,
            kind: digest,
        }

    def _fetch_range(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end), which must lie in the file.

        Raises ``HubBusy`` where another try may bring them, ``SourceChanged`` where the Hub has something else there,
        and ``SourceError`` for what it refuses.
        """
        try:
            storage = self._storage
            if storage is not None:
                try:
                    return self._read(storage, begin, end)
                except HubRefused as error:
                    if error.kind != "link":
                        raise
                    self._storage = None  # the signature has run out
            return self._read(self._address, begin, end)
        except HubRefused as error:
            raise SourceError(f"{self._url!r} {error}") from None

    def _read(self, address: str, begin: int, end: int) -> bytes:
        with self._client.ask("GET", address, {"range": f"bytes={begin}-{end - 1}"}) as reply:
            self._check(reply, begin, end)
            content = reply.body(end - begin)
        if len(content) != end - begin:
            raise HubBusy(f"the answer ended after {len(content)} of {end - begin} bytes")
        if not self._client.is_own(reply.url):
            self._storage = reply.url
        return content

    def _check(self, reply: Reply, begin: int, end: int) -> None:
        """Compares an answer with its request, before its body is read."""
        if reply.status == 416:
            raise SourceChanged(
                f"{self._url!r} ends before byte {end - 1}, expected {self.size} bytes in all"
            )
        if reply.hub and _digest_of(reply) != self._digest:
            raise SourceChanged(
                f"{self._url!r} has other content: found {_digest_of(reply)}, expected {self._digest}"
            )
        if reply.status == 200 and begin == 0 and end == self.size:
            return  # all of it was asked for
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", reply.headers.get("content-range", ""))
        if reply.status != 206 or match is None:
            raise SourceError(
                f"{self._url!r}: the Hub answered a request for a range with {reply.status} and no range"
            )
        if match[3] not in ("*", str(self.size)):
            raise SourceChanged(f"{self._url!r} has {match[3]} bytes, expected {self.size}")
        if (int(match[1]), int(match[2])) != (begin, end - 1):
            raise HubBusy(
                f"asked for bytes {begin}-{end - 1}, the answer has {match[1]}-{match[2]}"
            )


def _digest_of(reply: Reply) -> str:
    """A file's digest by the Hub's own tag: storage has tags of another kind. ``sha256:`` in large-file storage, else
    ``blob_id:``; a mirror's tag that is neither is an ``etag:``."""
    tag = (
        str(reply.hub.get("x-linked-etag") or reply.hub.get("etag") or "")
        .removeprefix("W/")
        .strip('"')
    )
    if re.fullmatch(r"[0-9a-f]{64}", tag):
        return f"sha256:{tag}"
    return f"blob_id:{tag}" if COMMIT.fullmatch(tag) else f"etag:{tag}"


def _info(held: repository.Repository, file: HubFile) -> dict[str, Any]:
    kind, _, digest = file.fingerprint.partition(":")
    name = repository.url_of(held.name, held.commit, file.path)
    return {
        "name": name,
        "type": "file",
        "size": file.size,
        "sha256" if kind == "sha256" else "blob_id": digest,
    }

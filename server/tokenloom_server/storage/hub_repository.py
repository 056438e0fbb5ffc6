"""A dataset on the Hub at one commit: its files, from the Hub or, offline, from the local cache, and their bytes."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.storage.hub_client import HubBusy, HubClient, HubRefused, Reply, retried
from tokenloom_server.storage.urls import before_wildcards

COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

#: Bytes of a dataset's card at most: what comes after them is no header.
CARD_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository at a commit."""

    path: str
    """Below the repository's root."""
    size: int
    fingerprint: str
    """``sha256:`` of the content where it lies in large-file storage, else ``blob:`` and its id in git."""


class Repository(ABC):
    """A dataset's repository at one commit."""

    #: ``ORG/NAME``, as the Hub has it.
    name: str
    commit: str

    def __init__(self, client: HubClient) -> None:
        self._client = client

    @abstractmethod
    def below(self, folder: str, *, deep: bool) -> Sequence[HubFile]:
        """The files in a folder (empty: the root), with ``deep`` also those in folders of it; none where there is no
        such folder. By path."""

    def text(self, path: str) -> str | None:
        """A small file; None where there is none."""
        cached = self._client.cached_file(self.name, self.commit, path)
        content = self._uncached(path) if cached is None else cached.read_bytes()
        return None if content is None else content.decode(errors="replace")

    @abstractmethod
    def _uncached(self, path: str) -> bytes | None:
        """A small file that is not in the cache; None where there is none."""


def url_of(name: str, commit: str, path: str) -> str:
    """How a manifest names a file on the Hub."""
    return f"hf://datasets/{name}@{commit}/{path}"


class OnlineRepository(Repository):
    """Asks the Hub, each question once. Safe for threads."""

    def __init__(self, client: HubClient, name: str, revision: str | None) -> None:
        """Resolves the revision; one request. Raises ``HubRefused`` and ``HubBusy``."""
        suffix = f"/revision/{quote(revision, safe='')}" if revision else ""
        # Alone: without it the answer names every file.
        info, _ = client.get_json(f"api/datasets/{name}{suffix}", {"expand": "sha"})
        super().__init__(client)
        try:
            self.name, self.commit = str(info["id"]), str(info["sha"])
        except (KeyError, TypeError):
            raise _no_hub(client, "the description of a dataset") from None
        if not _NAME.fullmatch(self.name) or not COMMIT.fullmatch(self.commit):
            raise _no_hub(client, "the name and commit of a dataset")
        self._listed: dict[tuple[str, bool], Sequence[HubFile]] = {}
        self._lock = threading.Lock()

    def below(self, folder: str, *, deep: bool) -> Sequence[HubFile]:
        with self._lock:
            if (folder, deep) not in self._listed:
                self._listed[folder, deep] = self._list(folder, deep)
            return self._listed[folder, deep]

    def _list(self, folder: str, deep: bool) -> Sequence[HubFile]:
        path = f"api/datasets/{self.name}/tree/{self.commit}" + (
            f"/{quote(folder, safe='')}" if folder else ""
        )
        query: dict[str, str] | None = {"recursive": str(deep), "expand": "False"}
        files: list[HubFile] = []
        while query is not None:
            try:
                page, query = self._client.get_json(path, query)
            except HubRefused as error:
                if error.kind == "entry" and folder:
                    return ()
                raise
            try:
                files += [_file(entry) for entry in page if entry["type"] == "file"]
            except (KeyError, TypeError, ValueError):
                raise _no_hub(self._client, "the list of a dataset's files") from None
        return sorted(files, key=lambda file: file.path)

    def _uncached(self, path: str) -> bytes | None:
        address = (
            f"{self._client.endpoint}/datasets/{self.name}/resolve/{self.commit}/{quote(path)}"
        )

        def read() -> bytes:
            with self._client.ask("GET", address) as reply:
                return reply.body(CARD_BYTES)

        try:
            return retried(read)
        except HubRefused as error:
            if error.kind == "entry":
                return None
            raise


class CachedRepository(Repository):
    """What the cache of huggingface_hub knows of a commit; asks nobody."""

    def __init__(self, client: HubClient, name: str, revision: str | None) -> None:
        """Raises ``HubRefused`` where the cache does not know the revision, or which files it has."""
        super().__init__(client)
        self.name = name
        self.commit = self._resolved(revision)
        tree = client.cached_tree(name, self.commit)
        if tree is None:
            raise self._offline(
                f"is not known at commit {self.commit} by the cache {client.cache_dir!r}",
                self.commit,
            )
        self._files = sorted((self._known(file) for file in tree), key=lambda file: file.path)

    def _resolved(self, revision: str | None) -> str:
        if revision is not None and COMMIT.fullmatch(revision):
            return revision
        folder = Path(self._client.cache_dir) / f"datasets--{self.name.replace('/', '--')}" / "refs"
        try:
            return (folder / (revision or "main")).read_text(encoding="utf-8").strip()
        except OSError:
            missing = f"is not in the cache {self._client.cache_dir!r} at {revision or 'main'!r}"
            raise self._offline(missing, revision) from None

    def _offline(self, missing: str, revision: str | None, path: str = "") -> HubRefused:
        download = f"hf download {self.name}{path} --repo-type dataset" + (
            f" --revision {revision}" if revision else ""
        )
        return HubRefused(
            "offline", f"{missing}, and HF_HUB_OFFLINE is set; while online: {download}"
        )

    def _known(self, file: Any) -> HubFile:
        """A ``RepoFile`` of the cache. The file itself is a link to one that is named by its digest."""
        cached = self._client.cached_file(self.name, self.commit, file.path)
        digest = cached.readlink().name if cached is not None and cached.is_symlink() else ""
        kind = {64: "sha256", 40: "blob"}.get(len(digest))
        return HubFile(file.path, int(file.size), f"{kind}:{digest}" if kind else "")

    def below(self, folder: str, *, deep: bool) -> Sequence[HubFile]:
        start = f"{folder}/" if folder else ""
        below = [file for file in self._files if file.path.startswith(start)]
        return below if deep else [file for file in below if "/" not in file.path[len(start) :]]

    def _uncached(self, path: str) -> None:
        if any(file.path == path for file in self._files):
            missing = f"has {path!r} at commit {self.commit}, but the cache {self._client.cache_dir!r} does not"
            raise self._offline(missing, self.commit, f" {path}")


def open_repository(client: HubClient, name: str, revision: str | None) -> Repository:
    """A dataset's repository at the commit that a revision (None: the main branch) is at.

    Raises ``HubRefused`` and ``HubBusy``.
    """
    return (CachedRepository if client.offline else OnlineRepository)(client, name, revision)


def find(repository: Repository, pattern: str) -> list[HubFile]:
    """The files that a pattern matches, by path; as fsspec's ``glob`` has it, but asking for no more folders than it
    takes. Raises ``ValueError`` for what is no pattern."""
    from fsspec.utils import glob_translate

    folder = before_wildcards(pattern).rpartition("/")[0]
    if not has_magic(pattern):
        return [file for file in repository.below(folder, deep=False) if file.path == pattern]
    rest = pattern[len(folder) + 1 :] if folder else pattern
    matches = re.compile(glob_translate(pattern)).match
    return [
        file
        for file in repository.below(folder, deep="/" in rest or "**" in rest)
        if matches(file.path)
    ]


def _file(entry: dict[str, Any]) -> HubFile:
    """An entry of the tree API. Of files in large-file storage, ``oid`` is the pointer's. Raises ``ValueError``."""
    path, lfs = str(entry["path"]), entry.get("lfs")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(
            f"{path!r} leads out of the repository"
        )  # and so would its place in the cache
    if lfs:
        return HubFile(path, int(lfs["size"]), f"sha256:{lfs['oid']}")
    return HubFile(path, int(entry["size"]), f"blob:{entry['oid']}")


def _no_hub(client: HubClient, what: str) -> HubRefused:
    return HubRefused(
        "other",
        f"cannot be looked up: {client.endpoint} answered with something that is not {what}",
    )


# Files on the Hub, as far as reading them by ranges needs: a small part of what fsspec calls a file system.
#
# Not huggingface_hub's own ``HfFileSystem``: it lists a folder before it opens a file in it, is redirected anew for
# each range, and waits out a rate limit where nobody sees it.


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
            held = open_repository(self._client, location.repo, location.revision)
            return {
                info["name"]: info
                for info in (_info(held, file) for file in find(held, location.path))
            }

    def ls(self, url: str, detail: bool = True) -> list[dict[str, Any]]:
        """The files directly in a folder, likewise. Raises ``FileNotFoundError`` where it has none."""
        location = HubPath.parse(url)
        with self._naming(url):
            held = open_repository(self._client, location.repo, location.revision)
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


def _info(held: Repository, file: HubFile) -> dict[str, Any]:
    kind, _, digest = file.fingerprint.partition(":")
    name = url_of(held.name, held.commit, file.path)
    return {
        "name": name,
        "type": "file",
        "size": file.size,
        "sha256" if kind == "sha256" else "blob_id": digest,
    }

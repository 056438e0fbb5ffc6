"""A stand-in for the Hugging Face Hub: a real HTTP server on loopback that speaks what huggingface_hub asks.

Two addresses, as the Hub has: its own, and that of a storage to which files in large-file storage are redirected with a
signature that runs out. Everything is counted, and any request can be made to fail.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import pytest

#: What lies in large-file storage, as the Hub's own .gitattributes has it; the rest is in git itself.
LARGE = (".parquet", ".arrow", ".gz", ".zst", ".bin")
CONVERSION = "refs/convert/parquet"


@dataclass
class Repo:
    """A repository of a dataset, or of a model: what each commit holds, and where its branches are."""

    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    old_names: list[str] = field(default_factory=list)

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """A new commit with these files and no others; moves the branch there. Returns its hash."""
        text = f"{self.name} {ref} {len(self.commits)} {sorted((p, hash_of(b)) for p, b in files.items())}"
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha

    def size(self, commit: str) -> int:
        return sum(map(len, self.commits[commit].values()))


def card(*configs: Mapping[str, Any]) -> bytes:
    """A dataset's card with these configs."""
    return f"---\n{json.dumps({'license': 'mit', 'configs': configs})}\n---\n# A dataset\n".encode()


def files(*paths: str, **more: bytes) -> dict[str, bytes]:
    """Each with content of its own."""
    return {path: f"content of {path}".encode() for path in paths} | more


@functools.cache
def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def blob_id(content: bytes) -> str:
    """Git's id of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Request:
    """One that was answered. ``place`` is ``hub`` or ``storage``; ``sent`` counts the body's bytes."""

    place: str
    method: str
    path: str
    headers: Mapping[str, str]
    status: int
    sent: int

    @property
    def is_file(self) -> bool:
        """Whether it was for a file's content."""
        return self.place == "storage" or "/resolve" in self.path


@dataclass
class Fault:
    """What becomes of the next ``times`` requests whose path matches: an answer of its own, a body that ends after
    ``cut`` bytes, a delay. Each ``every``-th of them alone, where that is more than 1."""

    path: str
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b'{"error":"made to fail"}'
    cut: int | None = None
    delay_s: float = 0.0
    place: str = "hub storage"
    times: float = 1
    every: int = 1
    seen: int = 0
    met: int = 0


class StandInHub:
    """The server. ``page`` is how many entries of a tree one answer has; ``tokens`` open what is private or gated."""

    def __init__(self, page: int = 1000) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: set[str] = set()
        self.page = page
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        #: The signature that storage takes; another one makes all links run out.
        self.signature = "secret-signature-0"
        self._lock = threading.Lock()
        self._servers = [_Server(self, place) for place in ("hub", "storage")]
        self.url, self.storage_url = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.05,)) for server in self._servers
        ]

    def __enter__(self) -> StandInHub:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def repo(self, name: str, **options: Any) -> Repo:
        """Adds an empty repository."""
        self.repos[name] = Repo(name, **options)
        return self.repos[name]

    def fail(self, path: str, **how: Any) -> Fault:
        """Makes requests fail; see ``Fault``. ``path`` is a regular expression that is searched for."""
        fault = Fault(path, **how)
        with self._lock:
            self.faults.append(fault)
        return fault

    def fault_of(self, place: str, path: str) -> Fault | None:
        """What is to become of a request."""
        with self._lock:
            for fault in self.faults:
                if place in fault.place and fault.met < fault.times and re.search(fault.path, path):
                    fault.seen += 1
                    if fault.seen % fault.every == 0:
                        fault.met += 1
                        return fault
        return None

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def forget(self) -> None:
        """Counts from here on."""
        with self._lock:
            self.requests.clear()

    def bytes_sent(self) -> int:
        """Of all bodies."""
        return sum(request.sent for request in list(self.requests))

    def asked(self, path: str, place: str = "hub") -> list[Request]:
        """The requests whose path a regular expression is found in."""
        return [
            one for one in list(self.requests) if one.place == place and re.search(path, one.path)
        ]

    def environment(self, cache: object, **more: str) -> dict[str, str]:
        """What a process needs to take this for the Hub, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **more,
        }

    def stand_in(
        self, monkeypatch: pytest.MonkeyPatch, cache: object, token: str | None = None
    ) -> None:
        """Makes this process take it for the Hub: huggingface_hub reads its environment when it is imported."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            self.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{cache}/hub")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", f"{cache}/token")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, hub: StandInHub, place: str) -> None:
        self.hub = hub
        self.place = place
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may go at any time."""


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.answer = _Answer(
            status,
            {"X-Error-Code": code, "X-Error-Message": message},
            json.dumps({"error": message}).encode(),
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # A head and a body are two writes, and the second would wait for the client's acknowledgement of the first.
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are noted instead."""

    def _handle(self) -> None:
        hub = self.server.hub
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = hub.fault_of(self.server.place, self.path)
        if fault is not None and fault.delay_s:
            time.sleep(fault.delay_s)
        if fault is not None and fault.status:
            answer = _Answer(fault.status, dict(fault.headers), fault.body)
        else:
            try:
                answer = self._storage() if self.server.place == "storage" else self._answer(body)
            except _Refused as refused:
                answer = refused.answer
        self._send(answer, fault.cut if fault is not None else None)

    def _send(self, answer: _Answer, cut: int | None) -> None:
        body = b"" if self.command == "HEAD" else answer.body
        sent = body if cut is None else body[:cut]
        self.server.hub.note(
            Request(
                self.server.place,
                self.command,
                self.path,
                dict(self.headers),
                answer.status,
                len(sent),
            )
        )
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(sent)
        if cut is not None:
            self.close_connection = True  # with less than was promised

    # --- the API ---------------------------------------------------------------------------------------

    def _answer(self, body: bytes) -> _Answer:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = parts.path.lstrip("/")
        if path == "api/datasets":
            return self._json(
                [
                    {"id": name}
                    for name in self.server.hub.repos
                    if name.startswith(query["author"] + "/")
                ]
            )
        if path == "api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name not in self.server.hub.repos:
                self.server.hub.repo(name).commit({})
            return self._json({"url": f"{self.server.hub.url}/datasets/{name}"})
        if path.startswith("api/models/"):
            return self._api(path.removeprefix("api/models/"), query, body)
        if path.startswith("api/resolve-cache/datasets/"):
            return self._file(
                *self._split(path.removeprefix("api/resolve-cache/datasets/"), ""), redirect=False
            )
        if path.startswith("api/datasets/"):
            return self._api(path.removeprefix("api/datasets/"), query, body)
        if path.startswith("datasets/"):
            return self._file(
                *self._split(path.removeprefix("datasets/"), "resolve/"), redirect=True
            )
        if "/resolve/" in path:
            return self._file(*self._split(path, "resolve/"), redirect=False)  # a model's
        raise _Refused(404, "", "Sorry, we can't find the page you are looking for.")

    def _api(self, rest: str, query: dict[str, str], body: bytes) -> _Answer:
        repo, rest = self._repo(rest)
        what, _, rest = rest.partition("/")
        if what in ("", "revision"):
            sha = self._commit(repo, unquote(rest) or "main")
            return self._json(
                {
                    "_id": "0", "id": repo.name, "author": repo.name.partition("/")[0], "sha": sha,
                    "private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False,
                    "lastModified": "2026-01-01T00:00:00.000Z", "tags": [], "downloads": 0, "likes": 0,
                    "siblings": [{"rfilename": path} for path in sorted(repo.commits[sha])],
                }
            )  # fmt: skip
        if what == "refs":
            kinds = {
                "branches": [ref for ref in repo.refs if "/" not in ref],
                "tags": [
                    ref.removeprefix("refs/tags/")
                    for ref in repo.refs
                    if ref.startswith("refs/tags/")
                ],
                "converts": [
                    ref.removeprefix("refs/convert/")
                    for ref in repo.refs
                    if ref.startswith("refs/convert/")
                ],
            }
            return self._json(
                {
                    kind: [{"name": one, "ref": one, "targetCommit": "0" * 40} for one in refs]
                    for kind, refs in kinds.items()
                }
            )
        if what == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            return self._json(
                {
                    "files": [
                        {"path": one, "uploadMode": "regular", "shouldIgnore": False}
                        for one in asked
                    ]
                }
            )
        if what == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            new = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            sha = repo.commit(repo.commits[repo.refs["main"]] | new)
            return self._json(
                {
                    "success": True,
                    "commitOid": sha,
                    "commitUrl": f"{self.server.hub.url}/datasets/{repo.name}/commit/{sha}",
                }
            )
        revision, _, folder = rest.partition("/")
        sha = self._commit(repo, unquote(revision))
        self._may_read(repo)
        files = repo.commits[sha]
        if what == "tree":
            return self._tree(files, unquote(folder), query)
        if what == "paths-info":
            asked = parse_qs(body.decode())["paths"]
            return self._json([_entry(path, files[path]) for path in asked if path in files])
        raise _Refused(404, "", f"no such call: {what}")

    def _tree(self, files: dict[str, bytes], folder: str, query: dict[str, str]) -> _Answer:
        start = f"{folder}/" if folder else ""
        below = {path: content for path, content in sorted(files.items()) if path.startswith(start)}
        if not below:
            raise _Refused(404, "EntryNotFound", f"{folder} does not exist")
        deep = query.get("recursive", "false").lower() == "true"
        entries: dict[str, dict[str, Any]] = {}
        for path, content in below.items():
            names = path[len(start) :].split("/")
            for depth in range(1, len(names) if deep else min(2, len(names))):
                inner = start + "/".join(names[:depth])
                entries[inner] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": inner}
            if deep or len(names) == 1:
                entries[path] = _entry(path, content)
        listed = list(entries.values())
        first = int(query.get("cursor", "0"))
        answer = self._json(listed[first : first + self.server.hub.page])
        if first + self.server.hub.page < len(listed):
            more = urlencode({**query, "cursor": str(first + self.server.hub.page)})
            answer.headers["Link"] = (
                f'<{self.server.hub.url}{urlsplit(self.path).path}?{more}>; rel="next"'
            )
        return answer

    # --- files -----------------------------------------------------------------------------------------

    def _file(self, repo: Repo, revision: str, path: str, *, redirect: bool) -> _Answer:
        sha = self._commit(repo, revision)
        self._may_read(repo)
        content = repo.commits[sha].get(path)
        if content is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        headers = {
            "X-Repo-Commit": sha,
            "Accept-Ranges": "bytes",
            "X-Linked-Size": str(len(content)),
        }
        if path.endswith(LARGE):
            digest = hash_of(content)
            query = urlencode({"Expires": "9999999999", "Signature": self.server.hub.signature})
            headers |= {"X-Linked-ETag": f'"{digest}"', "Content-Length": "0"}
            return _Answer(
                302, headers | {"Location": f"{self.server.hub.storage_url}/blobs/{digest}?{query}"}
            )
        headers |= {"ETag": f'"{blob_id(content)}"', "X-Linked-ETag": f'"{blob_id(content)}"'}
        if redirect:
            location = f"/api/resolve-cache/datasets/{repo.name}/{sha}/{quote(path)}"
            return _Answer(307, headers | {"Location": location, "Content-Length": "0"})
        return self._ranged(content, headers)

    def _storage(self) -> _Answer:
        parts = urlsplit(self.path)
        if self.command != "GET" or parse_qs(parts.query).get("Signature") != [
            self.server.hub.signature
        ]:
            return _Answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        digest = parts.path.removeprefix("/blobs/")
        for repo in self.server.hub.repos.values():
            for files in repo.commits.values():
                for content in files.values():
                    if hash_of(content) == digest:
                        # A tag that looks like a digest and is another one, as that of the Hub's storage.
                        return self._ranged(content, {"ETag": f'"{hash_of(digest.encode())}"'})
        return _Answer(404, {})

    def _ranged(self, content: bytes, headers: dict[str, str]) -> _Answer:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        length = {"Content-Length": str(len(content))}
        if match is None:
            return _Answer(200, headers | length, content)
        first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        if first >= len(content):
            return _Answer(416, headers | {"Content-Range": f"bytes */{len(content)}"})
        part = content[first : last + 1]
        found = {
            "Content-Range": f"bytes {first}-{last}/{len(content)}",
            "Content-Length": str(len(part)),
        }
        return _Answer(206, headers | found, part)

    # --- whom it lets in -------------------------------------------------------------------------------

    def _split(self, rest: str, marker: str) -> tuple[Repo, str, str]:
        repo, rest = self._repo(rest)
        revision, _, path = rest.removeprefix(marker).partition("/")
        return repo, unquote(revision), unquote(path)

    def _repo(self, rest: str) -> tuple[Repo, str]:
        """The repository that a path begins with, and what is behind it."""
        parts = rest.split("/")
        for name in ("/".join(parts[:2]), parts[0]):
            for repo in self.server.hub.repos.values():
                if name == repo.name or name in repo.old_names:
                    if repo.private and not self._known():
                        break
                    return repo, rest[len(name) :].lstrip("/")
        status = 404 if self._known() else 401
        raise _Refused(status, "RepoNotFound", "Repository not found")

    def _known(self) -> bool:
        """Whether the request has a token; one that is none is refused."""
        authorization = self.headers.get("Authorization")
        if authorization is None:
            return False
        if authorization.removeprefix("Bearer ") not in self.server.hub.tokens:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        return True

    def _may_read(self, repo: Repo) -> None:
        if repo.gated and not self._known():
            raise _Refused(
                401,
                "GatedRepo",
                f"Access to dataset {repo.name} is restricted. You must be authenticated.",
            )

    def _commit(self, repo: Repo, revision: str) -> str:
        sha = repo.refs.get(revision) or repo.refs.get(f"refs/tags/{revision}") or revision
        if sha not in repo.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def _json(self, document: object) -> _Answer:
        return _Answer(200, {"Content-Type": "application/json"}, json.dumps(document).encode())


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "oid": blob_id(content),
        "size": len(content),
        "path": path,
    }
    if path.endswith(LARGE):
        pointer = {"oid": hash_of(content), "size": len(content), "pointerSize": 134}
        entry |= {"oid": blob_id(hash_of(content).encode()), "lfs": pointer}
    return entry


@contextmanager
def stand_in_hub(page: int = 1000) -> Iterator[StandInHub]:
    """A server that is up."""
    with StandInHub(page) as hub:
        yield hub


@contextmanager
def hub_environment() -> Iterator[Mapping[str, str]]:
    """What a process needs to take a stand-in for the Hub, and may write there."""
    with stand_in_hub() as hub, tempfile.TemporaryDirectory() as cache:
        hub.tokens.add("hf_of_a_writer")
        yield hub.environment(cache, HF_TOKEN="hf_of_a_writer")

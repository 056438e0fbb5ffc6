"""A local S3 (moto's) that counts what it is asked for, and can be slow, busy or gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import moto.server
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "corpora"


class Request(NamedTuple):
    """What was asked for, and by whose key. ``range``: the bytes of it, as HTTP says it; empty for all."""

    method: str
    path: str
    query: str
    range: str
    key: str

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.query

    @property
    def is_read(self) -> bool:
        return self.method == "GET" and not self.is_listing


@dataclass
class S3Server:
    """``requests``: all since the last ``clear``. ``trouble`` is asked before each is answered: it may wait, and the
    status that it gives is the answer, if it gives any."""

    url: str
    requests: list[Request] = field(default_factory=list)
    trouble: Callable[[Request], int | None] = lambda _: None

    @property
    def environment(self) -> dict[str, str]:
        """What a process has to know to read from it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            # Only what the test gives.
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def reads(self) -> list[Request]:
        return [request for request in self.requests if request.is_read]

    def listings(self) -> list[Request]:
        return [request for request in self.requests if request.is_listing]

    def put(self, folder: Path) -> None:
        """Uploads all files below a folder, by their names in it."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put_object(path.relative_to(folder).as_posix(), path.read_bytes())

    def put_object(self, key: str, data: bytes) -> None:
        self._send("PUT", f"/{BUCKET}/{key}", data)

    def delete_object(self, key: str) -> None:
        self._send("DELETE", f"/{BUCKET}/{key}", None)

    def _send(self, method: str, path: str, data: bytes | None) -> None:
        import http.client

        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)
        connection.request(
            method,
            path,
            data,
            {"Authorization": "AWS4-HMAC-SHA256 Credential=k/20300101/us-east-1/s3"},
        )
        status = connection.getresponse().status
        connection.close()
        assert status < 300, (method, path, status)


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


@contextmanager
def s3_server(host: str = "127.0.0.1") -> Iterator[S3Server]:
    """A server with an empty bucket, in threads of this process."""
    backend = moto.server.DomainDispatcherApplication(moto.server.create_backend_app)
    found = S3Server("")

    def app(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, query = str(environ.get("PATH_INFO", "")), str(environ.get("QUERY_STRING", ""))
        key = (
            str(environ.get("HTTP_AUTHORIZATION", "")).partition("Credential=")[2].partition("/")[0]
        )
        request = Request(
            str(environ["REQUEST_METHOD"]), path, query, str(environ.get("HTTP_RANGE", "")), key
        )
        found.requests.append(request)
        status = found.trouble(request)
        if status is not None:
            start_response(f"{status} Trouble", [("Content-Length", "0")])
            return [b""]
        answer: Iterable[bytes] = backend(environ, start_response)
        return answer

    server = make_server(host, 0, app, threaded=True, request_handler=_Quiet)
    server.daemon_threads = True
    found.url = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        found._send("PUT", f"/{BUCKET}", None)
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3_storage() -> Iterator[S3Server]:
    """An empty store, which this process and those that it starts read from and write to meanwhile."""
    import s3fs
    from tokenloom_server.storage.remote import filesystem

    with s3_server() as store:
        before = dict(os.environ)
        os.environ |= store.environment
        # What was opened before speaks to another store.
        s3fs.S3FileSystem.clear_instance_cache()
        filesystem.cache_clear()
        try:
            yield store
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            filesystem.cache_clear()
            for name in store.environment:
                del os.environ[name]
            os.environ |= before


@contextmanager
def s3_environment() -> Iterator[Mapping[str, str]]:
    """What a process has to know to read from an empty store."""
    with s3_server() as store:
        yield store.environment

"""A site that sends every request elsewhere, and keeps who showed it what."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class Redirecting:
    """``heard`` holds (path, authorization) of every request; ``/elsewhere`` is another host's name for this one."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str | None]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.heard.append((self.path, self.headers.get("authorization")))
                self.send_response(404 if self.path == "/elsewhere" else 302)
                self.send_header(
                    "location", f"http://localhost:{site._server.server_port}/elsewhere"
                )
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Redirecting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

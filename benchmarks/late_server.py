"""A web server on this machine that answers late, as a store far away does; its bandwidth is this machine's."""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.results import ROOT


class Late(SimpleHTTPRequestHandler):
    """Files of a folder by ranges, each answer late; what was sent is written to standard error."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    delay_s = 0.0

    def send_head(self) -> Any:
        time.sleep(self.delay_s)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            return super().send_head()
        size = path.stat().st_size
        begin, end = int(asked[1]), min(int(asked[2]) + 1, size)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        with path.open("rb") as file:
            return io.BytesIO(os.pread(file.fileno(), end - begin, begin))

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = source.read()
        outputfile.write(data)
        os.write(sys.stderr.fileno(), b"%d\n" % len(data))  # whole, whichever thread answers beside

    def log_message(self, *_: object) -> None:
        pass


def answer(folder: str, delay_s: float) -> None:
    """Serves a folder until it is ended; its first line of standard output is the port."""
    Late.delay_s = delay_s
    os.chdir(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), Late) as server:
        server.daemon_threads = True
        print(server.server_port, flush=True)
        server.serve_forever()


@contextmanager
def late_server(folder: Path, delay_s: float, log: BinaryIO) -> Iterator[str]:
    """The address of a folder whose files come late. ``log`` gets the bytes of each answer, a line each."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.late_server",
        str(folder),
        "--delay-ms",
        str(delay_s * 1e3),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument(
        "--delay-ms", type=float, default=20.0, help="before each answer (default: %(default)s)"
    )
    options = parser.parse_args()
    answer(options.folder, options.delay_ms / 1e3)


if __name__ == "__main__":
    main()

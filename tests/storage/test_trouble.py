"""Storage that fails, is late, hangs or changes: reads go on where they can, and say why where they cannot."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.catalog import SOURCES, spec_of
from support.ports import free_port
from support.s3_server import BUCKET, s3_storage
from support.waiting import wait_for
from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import SourceChanged, SourceError, StorageError
from tokenloom_server.sources import files, manifest
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import Listings, Manifest, SourceFiles
from tokenloom_server.sources.open import open_source
from tokenloom_server.storage import io_stats, remote
from tokenloom_server.storage.file import Range
from tokenloom_server.storage.hedged_read import HedgedRead, is_final, reason_of
from tokenloom_server.storage.io_stats import (
    COMMAND_S,
    IoStats,
    RetryPolicy,
    given_up_soon,
    waits_said,
)
from tokenloom_server.storage.remote import open_file

Read = tuple[str, int, int]
#: Impatient enough for a test; errors come after seconds, not minutes.
HURRY = RetryPolicy(hedge_s=0.05, attempt_s=0.2, pause_s=0.01, longest_pause_s=0.05, total_s=1.0)
#: Where reads are counted: none is late, however busy the machine is.
PATIENT = HURRY._replace(hedge_s=60.0, attempt_s=60.0, total_s=60.0)
DATA = bytes(range(251)) * 40_000


class Troubled(MemoryFileSystem):
    """Storage in memory that does to each read what it is told to."""

    protocol = "troubled"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    #: Asked before a read is answered, with how many there were before it.
    trouble: ClassVar[Callable[[int], None]] = staticmethod(lambda _: None)
    reads: ClassVar[list[Read]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("troubled://", "memory://"))
        return stripped

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        number = len(self.reads)
        self.reads.append((path, start or 0, end or 0))
        type(self).trouble(number)
        found: bytes = super().cat_file(path, start, end)
        return found


@pytest.fixture
def storage() -> Iterator[type[Troubled]]:
    """Storage without trouble, as yet."""
    fsspec.register_implementation("troubled", Troubled, clobber=True)
    Troubled.trouble = staticmethod(lambda _: None)
    yield Troubled
    Troubled.store.clear()
    Troubled.reads.clear()
    remote.filesystem.cache_clear()


@pytest.fixture
def hang() -> Iterator[Callable[[], None]]:
    """Waits for the end of the test."""
    over = threading.Event()
    yield lambda: (over.wait(), None)[1]
    over.set()


def put(name: str, data: bytes) -> str:
    fsspec.filesystem("troubled").pipe_file(f"/{name}", data)
    return f"troubled://{name}"


def fails(error: Exception, times: int) -> Callable[[int], None]:
    def trouble(number: int) -> None:
        if number < times:
            raise error

    return trouble


def test_a_read_that_fails_is_tried_again(storage: type[Troubled], tmp_path: Path) -> None:
    url = put("a/x.bin", DATA)
    storage.trouble = staticmethod(fails(ConnectionResetError("cut"), 3))
    shared = IoStats(PATIENT)
    with open_file(url, tmp_path, io_stats=shared) as file:
        assert file.read_at(7, 100_000) == DATA[7:100_007]
    assert len(storage.reads) == 4
    assert shared.longest_wait(0.0) is None
    assert (shared.measures.retries.value, shared.measures.hedges.value) == (3, 0)
    assert shared.measures.reads.read()[0][-1] == ("+Inf", 2), (
        "what the storage says of the file, and the read"
    )


def test_a_read_that_hangs_is_started_a_second_time_and_the_first_answer_counts(
    storage: type[Troubled], tmp_path: Path, hang: Callable[[], None]
) -> None:
    url = put("a/x.bin", DATA)
    storage.trouble = staticmethod(lambda number: hang() if number == 0 else None)
    shared = IoStats(HURRY._replace(total_s=60.0))
    with open_file(url, tmp_path, io_stats=shared) as file:
        assert file.read_at(0, 70_000) == DATA[:70_000]
    assert len(storage.reads) > 1
    assert shared.measures.hedges.value >= 1


def test_what_is_usual_decides_when_a_read_is_late() -> None:
    shared = IoStats(RetryPolicy(hedge_s=0.5, hedge_factor=3, attempt_s=30))
    for _ in range(20):
        shared.took(1 << 20, 2.0)
    assert shared.hedge_after_s(1 << 20) == 6.0
    assert shared.hedge_after_s(1 << 10) == 0.5, "others of other sizes"
    for _ in range(64):
        shared.took(1 << 20, 60.0)
    assert shared.hedge_after_s(1 << 20) == 30.0, (
        "never later than a further attempt is made anyway"
    )


def test_storage_that_never_answers_is_named_and_then_an_error(
    storage: type[Troubled], tmp_path: Path, hang: Callable[[], None]
) -> None:
    url = put("a/x.txt", b"one\ntwo\n")
    source = spec_of(f"txt:{url}:text")
    shared = IoStats(HURRY)
    reader = open_source(source, tmp_path, io_stats=shared)
    storage.trouble = staticmethod(lambda _: hang())
    said: list[str] = []

    def watch() -> None:
        while not said:
            time.sleep(0.01)
            wait = shared.longest_wait(0.05)
            said.extend([wait.text()] if wait is not None and "attempt" in wait.text() else [])

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(StorageError) as caught:
        list(reader.read(0, 0))
    watcher.join()

    assert f"source 'txt:{url}:text': '{url}' could not be read for 1 s, in " in str(caught.value)
    assert "then start again (trainers, from their last checkpoint)" in str(caught.value)
    assert re.match(rf"storage: source 'txt:{url}:text': '{url}' \(for [0-9]+ s, attempt ", said[0])


@pytest.mark.parametrize("scheme", ["parquet", "jsonl", "txt", "arrow"])
def test_failing_storage_is_no_damage(storage: type[Troubled], tmp_path: Path, scheme: str) -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"text": ["some text " * 50] * 4000})
    if scheme == "parquet":
        pq.write_table(table, sink, row_group_size=500, compression="none", use_dictionary=False)
    with pa.ipc.new_stream(sink, table.schema) if scheme == "arrow" else sink as stream:
        if scheme == "arrow":
            stream.write_table(table, max_chunksize=500)
        elif scheme != "parquet":
            sink.write(b'{"text": "x"}\n' * 200_000)
    ending = "/*" if scheme != "arrow" else ""
    put(f"a/x.{scheme}", sink.getvalue().to_pybytes())
    reader = open_source(
        spec_of(f"{scheme}:troubled://a{ending}:text"), tmp_path, io_stats=IoStats(HURRY)
    )
    first = len(storage.reads)

    def trouble(number: int) -> None:
        if number > first:
            raise OSError("the network is down")

    storage.trouble = staticmethod(trouble)
    with pytest.raises(
        StorageError, match=r"could not be read for 1 s, .*OSError: the network is down"
    ):
        list(reader.read(0, 0))


@pytest.mark.parametrize(
    ("error", "reads"), [(PermissionError("not yours"), 2), (FileNotFoundError("gone"), 1)]
)
def test_a_refusal_is_asked_for_again_with_new_credentials_alone(
    storage: type[Troubled], tmp_path: Path, error: OSError, reads: int
) -> None:
    url = put("a/x.bin", DATA)
    with open_file(url, tmp_path, io_stats=IoStats(PATIENT)) as file:
        storage.trouble = staticmethod(fails(error, 10**9))
        with pytest.raises(
            StorageError, match=f"its storage refuses it .{type(error).__name__}: {error}"
        ):
            file.read_at(0, 10)
    assert len(storage.reads) == reads


def test_a_file_that_changes_while_it_is_read_is_named(
    storage: type[Troubled], tmp_path: Path
) -> None:
    url = put("a/x.bin", DATA)
    with open_file(url, tmp_path, "the file", IoStats(PATIENT)) as file:
        put("a/x.bin", DATA[:1000])
        with pytest.raises(
            SourceChanged, match=r"the file was changed while being read: found 1000 bytes"
        ):
            file.read_at(200_000, 100_000)
        fsspec.filesystem("troubled").rm_file("/a/x.bin")
        with pytest.raises(
            SourceChanged, match="the file is missing: it was deleted while being read"
        ):
            file.read_at(200_000, 100_000)


def test_what_was_planned_is_read_ahead_in_few_reads_and_little_memory(
    storage: type[Troubled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put("a/x.bin", DATA)
    shared = IoStats(PATIENT)
    begin, end = 1_000_000, 9_000_000
    with open_file(url, tmp_path, io_stats=shared) as file:
        file.plan([Range(begin, 4_000_000), Range(4_100_000, end)])
        for at in range(begin, end, 33_333):
            length = min(33_333, end - at)
            assert bytes(file.read_at(at, length)) == DATA[at : at + length]
    assert sorted(read[1:] for read in storage.reads) == [
        (begin, 2 << 20),
        (2 << 20, 4 << 20),
        (4 << 20, 8 << 20),
        (8 << 20, end),
    ]
    assert shared.reserve(io_stats.AHEAD_BYTES), "all that was taken was given back"


def test_without_memory_for_it_nothing_is_read_ahead(
    storage: type[Troubled], tmp_path: Path
) -> None:
    url = put("a/x.bin", DATA)
    shared = IoStats(PATIENT)
    assert shared.reserve(io_stats.AHEAD_BYTES)
    with open_file(url, tmp_path, io_stats=shared) as file:
        file.plan([Range(0, len(DATA))])
        for at in range(0, 1_000_000, 100_000):
            assert file.read_at(at, 100_000) == DATA[at : at + 100_000]
    assert [read[1:] for read in storage.reads] == [
        (at, at + 100_000) for at in range(0, 1_000_000, 100_000)
    ]


def test_reading_elsewhere_leaves_the_plan_alone(storage: type[Troubled], tmp_path: Path) -> None:
    url = put("a/x.bin", DATA)
    with open_file(url, tmp_path, io_stats=IoStats(PATIENT)) as file:
        file.plan([Range(500_000, 2_000_000)])
        for at in (500_000, len(DATA) - 8, 600_000, 0, 1_600_000, 1_999_990, 700_000):
            assert bytes(file.read_at(at, 100_000)) == DATA[at : at + 100_000]
    assert (500_000, 1 << 20) in [read[1:] for read in storage.reads]


def test_a_server_that_says_when_to_come_again_is_left_alone_until_then() -> None:
    class TooMany(Exception):
        class response:  # noqa: N801
            status_code = 429
            headers: ClassVar[dict[str, str]] = {"Retry-After": "0.3"}

    began, answers = time.monotonic(), iter([TooMany("busy"), 7])

    def work() -> Any:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    assert HedgedRead(work, "it", IoStats(PATIENT)).result() == 7
    assert time.monotonic() - began >= 0.3


class Site(BaseHTTPRequestHandler):
    """A folder of a web server, with what becomes of each request: a status, or a connection that is reset at 0."""

    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        if not self.status:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        body = (
            b'<a href="x.txt">x</a> <a href="sub/">s</a>'
            if self.path.endswith("/")
            else b"one\ntwo\n"
        )
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"one"')
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Callable[[int], str]]:
    """Gives the URL of a server, from now on in this trouble."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def place(status: int) -> str:
        Site.status = status
        return f"http://127.0.0.1:{server.server_port}/d"

    yield place
    server.shutdown()
    thread.join()
    server.server_close()
    remote.filesystem.cache_clear()


def shard_at(place: str) -> tuple[Spec, Shard]:
    return spec_of(f"txt:{place}/x.txt:text"), Shard(f"{place}/x.txt", 8, "etag:one")


#: By what befalls a web server, what its library raises says, beneath all else.
FAULTS = {
    "refused": "Cannot connect to host 127.0.0.1",
    "0": "Connection reset|Server disconnected",
    "tls": "ssl:",
    "name": "Cannot connect to host no-such-host.invalid",
    "429": "429, message='Too Many Requests'",
    "500": "500, message='Internal Server Error'",
    "503": "503, message='Service Unavailable'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_web_server_that_fails_is_taken_for_what_it_says(
    site: Callable[[int], str], fault: str
) -> None:
    places = {
        "refused": f"http://127.0.0.1:{free_port()}/d",
        "name": "http://no-such-host.invalid/d",
    }
    place = places.get(fault) or site(int(fault) if fault.isdecimal() else 200)
    place = place.replace("http:", "https:") if fault == "tls" else place
    files = remote.filesystem(remote.root(place))
    for ask in (files.info, files.open, files.ls):
        with pytest.raises(Exception, match=r"(?s).") as caught:
            ask(f"{place}/x.txt")
        found = reason_of(caught.value)
        assert re.search(FAULTS[fault], str(found))
        assert not isinstance(found, FileNotFoundError)
        assert not is_final(found)


@pytest.mark.parametrize(
    ("status", "kind", "text", "of_pattern"),
    [
        (404, SourceChanged, "is missing .expected 8 bytes", "no file matches"),
        (
            410,
            SourceChanged,
            "is missing .expected 8 bytes",
            "its storage refuses it .ClientResponseError: 410",
        ),
        (401, StorageError, "its storage refuses it .ClientResponseError: 401", ""),
        (403, StorageError, "its storage refuses it .ClientResponseError: 403", ""),
        (0, StorageError, "could not be read for 1 s", ""),
    ],
)
def test_only_an_answer_that_it_is_not_there_is_a_file_that_was_deleted(
    site: Callable[[int], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    kind: type[Exception],
    text: str,
    of_pattern: str,
) -> None:
    monkeypatch.setattr(IoStats, "default_policy", PATIENT if status else HURRY)
    place = site(status)
    spec, shard = shard_at(place)
    with pytest.raises(kind, match=text):
        files.open_shard(spec, shard, tmp_path)
    with pytest.raises(kind, match=text):
        manifest.verify(
            Manifest((SourceFiles(str(spec), (shard,)),)), tmp_path, SOURCES, Listings(SOURCES)
        )
    # A folder that fails is not an empty one.
    for pattern in ("*.txt", "**/*.txt", "s*/*.txt"):
        with pytest.raises(SourceError, match=of_pattern or text):
            open_source(spec_of(f"txt:{place}/{pattern}:text"), tmp_path)


@pytest.mark.parametrize(
    ("status", "kind"), [(0, StorageError), (503, StorageError), (404, SourceChanged)]
)
def test_a_web_server_that_is_away_while_a_file_is_read_is_waited_for(
    site: Callable[[int], str], tmp_path: Path, status: int, kind: type[Exception]
) -> None:
    spec, shard = shard_at(site(200))
    io_stats = IoStats(PATIENT)
    with files.open_shard(spec, shard, tmp_path, io_stats) as file:
        site(status)
        io_stats.wait_at_most(1 if kind is StorageError else 60)
        with pytest.raises(kind):
            file.read_at(0, 8)
        if kind is StorageError:
            io_stats.wait_at_most(60)
            later = threading.Timer(0.2, site, (200,))
            later.start()
            assert file.read_at(0, 8) == b"one\ntwo\n"
            later.join()


def test_credentials_that_ran_out_are_asked_for_anew(tmp_path: Path) -> None:
    with s3_storage() as store:
        store.put_object("x.txt", b"one\ntwo\n")
        url = f"s3://{BUCKET}/x.txt"
        with open_file(url, tmp_path, io_stats=IoStats(PATIENT)) as file:
            store.trouble = lambda request: None if request.key == "new-key" else 403
            with pytest.raises(
                StorageError, match=r"its storage refuses it \(PermissionError: Forbidden\)"
            ):
                file.read_at(0, 8)
            os.environ["AWS_ACCESS_KEY_ID"] = "new-key"
            assert file.read_at(0, 8) == b"one\ntwo\n"


def test_a_refusal_that_says_expired_is_waited_for(storage: type[Troubled], tmp_path: Path) -> None:
    url = put("a/x.bin", DATA)
    storage.trouble = staticmethod(fails(PermissionError("The provided token has expired."), 6))
    with open_file(url, tmp_path, io_stats=IoStats(PATIENT)) as file:
        assert file.read_at(0, 10) == DATA[:10]


def test_a_file_of_this_machine_that_may_not_be_read_is_not_one_that_changed(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.txt").symlink_to("x.txt")  # also root may not open it
    spec, shard = shard_at("x")[0], Shard("x.txt", 8, "xxh3:0")
    with pytest.raises(
        StorageError, match=r"cannot be read .Too many levels of symbolic links.*nothing is lost"
    ):
        files.open_shard(spec, shard, tmp_path)
    with pytest.raises(StorageError, match="Too many levels"):
        files.difference(shard, tmp_path)


def test_a_command_does_not_wait_as_long_as_a_run() -> None:
    with given_up_soon():
        assert IoStats().retry_policy.total_s == COMMAND_S
    assert IoStats().retry_policy.total_s == 300


def test_storage_that_is_slow_while_a_run_is_brought_up_is_said_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(io_stats, "SAID_EVERY_S", 0.01)
    with waits_said("wiki"), IoStats().waiting("s3://bucket/a.parquet"):
        wait_for(lambda: len(caplog.messages) >= 2, "two lines of it")
    said = "wiki: waiting for storage: s3://bucket/a.parquet (for "
    assert all(message.startswith(said) for message in caplog.messages)

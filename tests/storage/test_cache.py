"""The cache of remote objects: what was read is read from the disk, and nothing else than the object has."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tokenloom_server.errors import ConfigError
from tokenloom_server.storage.cache import BLOCK_BYTES, FOLDER, SIZE, BlockCache, block_cache
from tokenloom_server.storage.file import Range
from tokenloom_server.storage.remote import open_file

URL = "memory://objects/a.bin"
DATA = random.Random(1).randbytes(5 * BLOCK_BYTES // 2)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An object in fsspec's file system in memory, and a cache on the disk."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    block_cache.cache_clear()
    files = fsspec.filesystem("memory")
    files.pipe_file("/objects/a.bin", DATA)
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    block_cache.cache_clear()


def restarted() -> BlockCache:
    """The cache, as a new process finds it."""
    block_cache.cache_clear()
    cache = block_cache()
    assert cache is not None
    return cache


def read(begin: int, end: int) -> bytes:
    with open_file(URL, Path()) as file:
        return bytes(file.read_at(begin, end - begin))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Object:
    """What a cache asks for of an object of 64 blocks, and how often."""

    size = 64 * BLOCK_BYTES
    fetches = 0

    def fetch(self, begin: int, end: int) -> bytes:
        self.fetches += 1
        return b"".join(
            bytes([number]) * BLOCK_BYTES
            for number in range(begin // BLOCK_BYTES, end // BLOCK_BYTES)
        )

    def read(self, cache: BlockCache, number: int) -> None:
        begin = number * BLOCK_BYTES
        assert cache.read("object", self.size, begin + 9, begin + BLOCK_BYTES, self.fetch) == bytes(
            [number]
        ) * (BLOCK_BYTES - 9)


def test_what_was_read_is_fetched_once_also_after_a_restart(store: Any) -> None:
    for fetched in (len(DATA), 0):
        cache = restarted()
        with open_file(URL, Path()) as file:
            file.plan([Range(400_000, len(DATA))])
            for begin in range(400_000, len(DATA), 70_000):
                assert bytes(file.read_at(begin, 70_000)) == DATA[begin : begin + 70_000]
        assert cache.fetched_bytes == fetched
    assert cache.cached_bytes >= len(DATA)
    for _ in range(50):
        begin, end = sorted(random.Random(2).sample(range(len(DATA)), 2))
        assert read(begin, end) == DATA[begin:end]
    assert cache.fetched_bytes == 0


def test_a_short_read_is_looked_up_and_not_kept(store: Any, tmp_path: Path) -> None:
    assert read(10, 20) == DATA[10:20]
    assert files_of(tmp_path) == []
    read(0, 200_000)
    kept = restarted()
    assert read(10, 20) == DATA[10:20]
    assert kept.cached_bytes == BLOCK_BYTES
    store.pipe_file("/objects/a.bin", DATA[:5000])
    assert read(10, 20) == DATA[10:20]
    assert len(files_of(tmp_path)) == 2, "a small object is kept whole"


def test_an_object_that_changed_is_not_served_as_it_was(store: Any) -> None:
    assert read(0, len(DATA)) == DATA
    store.pipe_file("/objects/a.bin", DATA[::-1])
    assert read(0, len(DATA)) == DATA[::-1]


class WebFile(BaseHTTPRequestHandler):
    """A web server's file with an ETag; the first request for bytes is answered with 503."""

    was_busy = False

    def do_HEAD(self) -> None:
        self._answer(200, DATA, empty=True)

    def do_GET(self) -> None:
        begin, end = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
        self._answer(206 if WebFile.was_busy else 503, DATA[begin : end + 1])
        WebFile.was_busy = True

    def _answer(self, status: int, content: bytes, *, empty: bool = False) -> None:
        self.send_response(status)
        for name, value in (
            ("etag", '"1"'),
            ("accept-ranges", "bytes"),
            ("content-length", str(len(content))),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if empty else content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_web_servers_file_is_known_by_its_etag(store: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), WebFile)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for fetched in (len(DATA), 0):
        cache = restarted()
        with open_file(f"http://127.0.0.1:{server.server_port}/a.bin", Path()) as file:
            assert bytes(file.read_at(0, len(DATA))) == DATA
        assert cache.fetched_bytes == fetched
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_damaged_block_is_fetched_again(
    store: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(0, len(DATA))
    first, second, third = files_of(tmp_path)
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    second.write_bytes(b"")
    second.with_name("other").write_bytes(b"left by a kill")
    third.write_bytes(first.read_bytes())
    cache = restarted()
    assert read(0, len(DATA)) == DATA
    assert cache.fetched_bytes == len(DATA)
    assert caplog.text.count("is damaged; what it held is fetched again") == 3
    assert read(0, len(DATA)) == DATA
    assert cache.fetched_bytes == len(DATA)


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    cache, remote = BlockCache(tmp_path, 16 * BLOCK_BYTES), Object()
    for number in range(64):
        remote.read(cache, number)
        remote.read(cache, 0)
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 16 * BLOCK_BYTES
    assert remote.fetches == 64
    again = BlockCache(tmp_path, 4 * BLOCK_BYTES)
    remote.read(again, 1)
    assert len(files_of(tmp_path)) == 3, "a cache that became smaller"


def test_what_else_lies_in_the_folder_is_not_removed(tmp_path: Path) -> None:
    mine = tmp_path / "notes/mine.txt"
    mine.parent.mkdir()
    mine.write_text("older than any block")
    cache = BlockCache(tmp_path, 2 * BLOCK_BYTES)
    for number in range(8):
        Object().read(cache, number)
    assert mine.exists()


def test_several_share_a_folder(tmp_path: Path) -> None:
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        cache, draws = BlockCache(tmp_path, 8 * BLOCK_BYTES), random.Random(seed)
        try:
            for _ in range(30):
                Object().read(cache, draws.randrange(12))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_without_room_reading_goes_on_with_one_warning(
    store: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("no folder can be made below this")
    for _ in range(2):
        assert read(0, len(DATA)) == DATA
    assert caplog.text.count("what cannot be kept there is fetched each time") == 1


def test_a_size_without_a_unit_or_a_folder_is_refused(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("500", "0G"):
        monkeypatch.setenv(SIZE, size)
        with pytest.raises(
            ConfigError, match=f"found '{size}', expected a whole number of M, G or T, such as 500G"
        ):
            restarted()
    monkeypatch.delenv(FOLDER)
    with pytest.raises(
        ConfigError,
        match="TOKENLOOM_CACHE_SIZE: is '0G', but there is no --cache; give it a folder",
    ):
        restarted()

"""Storage that fails, is late, hangs or changes: reads go on where they can, and say why where they cannot."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.catalog import spec_of
from tokenloom_server.errors import SourceChanged, StorageError
from tokenloom_server.sources.open import open_source
from tokenloom_server.storage import io_stats, remote
from tokenloom_server.storage.file import Range
from tokenloom_server.storage.hedged_read import HedgedRead
from tokenloom_server.storage.io_stats import IoStats, RetryPolicy
from tokenloom_server.storage.open import open_file

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

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
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
    assert shared.measures.reads.read()[0][-1] == ("+Inf", 2), "what the storage says of the file, and the read"


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
    assert shared.hedge_after_s(1 << 20) == 30.0, "never later than a further attempt is made anyway"


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
    assert "start the trainers again from their last checkpoint" in str(caught.value)
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
    reader = open_source(spec_of(f"{scheme}:troubled://a{ending}:text"), tmp_path, io_stats=IoStats(HURRY))
    first = len(storage.reads)

    def trouble(number: int) -> None:
        if number > first:
            raise OSError("the network is down")

    storage.trouble = staticmethod(trouble)
    with pytest.raises(StorageError, match=r"could not be read for 1 s, .*OSError: the network is down"):
        list(reader.read(0, 0))


@pytest.mark.parametrize("error", [PermissionError("not yours"), FileNotFoundError("gone")])
def test_a_refusal_is_not_asked_for_again(storage: type[Troubled], tmp_path: Path, error: OSError) -> None:
    url = put("a/x.bin", DATA)
    with open_file(url, tmp_path, io_stats=IoStats(PATIENT)) as file:
        storage.trouble = staticmethod(fails(error, 10**9))
        with pytest.raises(StorageError, match=f"its storage refuses it .{type(error).__name__}: {error}"):
            file.read_at(0, 10)
    assert len(storage.reads) == 1


def test_a_file_that_changes_while_it_is_read_is_named(storage: type[Troubled], tmp_path: Path) -> None:
    url = put("a/x.bin", DATA)
    with open_file(url, tmp_path, "the file", IoStats(PATIENT)) as file:
        put("a/x.bin", DATA[:1000])
        with pytest.raises(SourceChanged, match=r"the file was changed while being read: found 1000 bytes"):
            file.read_at(200_000, 100_000)
        fsspec.filesystem("troubled").rm_file("/a/x.bin")
        with pytest.raises(SourceChanged, match="the file is missing: it was deleted while being read"):
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


def test_without_memory_for_it_nothing_is_read_ahead(storage: type[Troubled], tmp_path: Path) -> None:
    url = put("a/x.bin", DATA)
    shared = IoStats(PATIENT)
    assert shared.reserve(io_stats.AHEAD_BYTES)
    with open_file(url, tmp_path, io_stats=shared) as file:
        file.plan([Range(0, len(DATA))])
        for at in range(0, 1_000_000, 100_000):
            assert file.read_at(at, 100_000) == DATA[at : at + 100_000]
    assert [read[1:] for read in storage.reads] == [(at, at + 100_000) for at in range(0, 1_000_000, 100_000)]


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

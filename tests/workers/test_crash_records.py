"""The rows that were being encoded when a process died, as the next one finds them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenloom_server.workers.crashes import CrashRecords, SuspectRows

#: Notes rows, says so, and dies of a real fault of memory.
_DYING = """
import ctypes, sys
from contextlib import ExitStack
from pathlib import Path
from tokenloom_server.workers.crashes import CrashRecords

records = CrashRecords(Path(sys.argv[1]), "run")
with records.noting(0, 0, 0, 10):
    pass
with ExitStack() as stack:
    for place in sys.argv[2:]:
        stack.enter_context(records.noting(*map(int, place.split(","))))
    ctypes.string_at(0)
"""


def die_at(folder: Path, *places: tuple[int, int, int, int]) -> None:
    arguments = [",".join(map(str, place)) for place in places]
    done = subprocess.run([sys.executable, "-c", _DYING, str(folder), *arguments], check=False)
    assert done.returncode == -signal.SIGSEGV


@contextmanager
def started(folder: Path) -> Iterator[CrashRecords]:
    """A process that starts, and ends in order."""
    records = CrashRecords(folder, "run")
    yield records
    records.close()


def test_rows_at_which_the_process_died_twice_are_suspected_and_no_others(tmp_path: Path) -> None:
    die_at(tmp_path, (3, 1, 100, 200), (4, 0, 0, 50))
    with started(tmp_path) as records:
        assert records.suspected(3, 1, 0, 1000) == [], "one death may be anybody's"
    # An orderly end in between changes nothing; of the second death, other rows are narrowed or forgotten.
    die_at(tmp_path, (3, 1, 150, 300), (5, 0, 0, 50))
    with started(tmp_path) as records:
        assert records.suspected(3, 1, 0, 1000) == [SuspectRows(3, 1, 150, 200, deaths=2)]
        for elsewhere in (
            (3, 1, 0, 150),
            (3, 1, 200, 1000),
            (3, 0, 0, 1000),
            (4, 0, 0, 50),
            (5, 0, 0, 50),
        ):
            assert records.suspected(*elsewhere) == []


def test_what_the_verdict_proves_is_kept_and_what_it_clears_is_not(tmp_path: Path) -> None:
    for _ in range(2):
        die_at(tmp_path, (0, 0, 10, 20), (1, 0, 10, 20))
    with started(tmp_path) as records:
        records.settle(0, 0, 8, 24, [13])
        # A block that holds only some of them proves nothing of the others.
        records.settle(1, 0, 12, 15, [])
        assert records.suspected(0, 0, 8, 24) == [SuspectRows(0, 0, 13, 14, deaths=2, proven=True)]
        assert records.suspected(1, 0, 8, 24) == [
            SuspectRows(1, 0, 10, 12, deaths=2),
            SuspectRows(1, 0, 15, 20, deaths=2),
        ]
        records.settle(1, 0, 8, 24, [])
        assert records.suspected(1, 0, 8, 24) == []
    die_at(tmp_path, (2, 0, 0, 5))
    with started(tmp_path) as records:
        assert records.suspected(0, 0, 0, 100) == [SuspectRows(0, 0, 13, 14, deaths=2, proven=True)]
        assert records.suspected(0, 0, 14, 100) == []


def test_an_orderly_end_leaves_nothing_behind_and_a_process_at_work_is_left_alone(
    tmp_path: Path,
) -> None:
    with started(tmp_path) as one:
        with one.noting(0, 0, 0, 10), started(tmp_path) as other:
            assert other.suspected(0, 0, 0, 10) == []
            assert len(list(tmp_path.iterdir())) == 2
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_name_begins_alike_has_its_own(tmp_path: Path) -> None:
    die_at(tmp_path, (0, 0, 0, 10))
    CrashRecords(tmp_path, "run.b").close()
    CrashRecords(tmp_path, "ru").close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_list_that_cannot_be_read_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run@suspects.json").write_text("{", encoding="utf-8")
    with started(tmp_path) as records:
        assert records.suspected(0, 0, 0, 10) == []
    assert "run@suspects.json cannot be read" in caplog.text


def test_more_callers_than_notes_are_served_all_the_same(tmp_path: Path) -> None:
    with started(tmp_path) as records:
        noted = [records.noting(0, 0, row, row + 1) for row in range(100)]
        for each in noted:
            each.__enter__()
        for each in noted:
            each.__exit__(None, None, None)
        with records.noting(0, 0, 0, 1):
            (file,) = tmp_path.glob("run@*.at-work")
            assert file.stat().st_size == 64 * 32
            assert file.read_bytes().count(b"\0") < 64 * 32
        assert file.read_bytes() == bytes(64 * 32)

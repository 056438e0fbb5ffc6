"""Whether a process is gone, as client and server name it: by real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenloom_proto import process
from tokenloom_proto.process import identity, is_gone

_NAMES_ITSELF = (
    "import time, tokenloom_proto.process as p; print(p.identity(), flush=True); time.sleep(60)"
)


def test_only_what_ended_on_this_machine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _NAMES_ITSELF], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert not is_gone(name)
        child.send_signal(signal.SIGSTOP)
        assert not is_gone(name)
        where, kernel = name.split(" ", 1)
        host, number, started = where.rsplit(":", 2)
        assert is_gone(
            f"{host}:{number}:{int(started) - 1} {kernel}"
        )  # the id is another process's by now
        child.kill()
        while "Z" not in Path(f"/proc/{number}/stat").read_text().rpartition(")")[2]:
            pass
        assert is_gone(name)  # a zombie
    assert is_gone(name)
    boot, namespace = kernel.split(" ")
    for other in (
        f"{where} other-{boot} {namespace}",
        f"{where} {boot} pid:[1]",
        where,
        "",
        f"{host}:x:y {kernel}",
    ):
        assert not is_gone(other)
    assert not is_gone(identity())
    monkeypatch.setattr("os.kill", lambda number, signal: (_ for _ in ()).throw(PermissionError()))
    assert not is_gone(name)


def test_a_system_without_proc_names_host_and_id_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_kernel", lambda: Path("/nowhere").read_text())
    assert identity().count(":") == 1
    assert not is_gone(identity())


def test_a_name_that_the_kernel_cuts_within_a_character_is_one() -> None:
    cut = "тренировка".encode()[:15]
    script = f"import ctypes; ctypes.CDLL(None).prctl(15, {cut!r}, 0, 0, 0); {_NAMES_ITSELF}"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert " " in name
        assert not is_gone(name)
        child.kill()
    assert is_gone(name)

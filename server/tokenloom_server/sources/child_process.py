"""Child processes that end with the process that started them, whatever they are at."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import weakref
from typing import Any


class ChildProcess(subprocess.Popen[bytes]):
    """A module of this package as a program, in a process group of its own. Its last argument is a pipe for
    ``end_with_parent``."""

    def __init__(self, module: str, *arguments: str, **options: Any) -> None:
        """``options`` are those of ``Popen``."""
        reading, writing = os.pipe()
        weakref.finalize(self, os.close, writing)
        try:
            command = [sys.executable, "-m", module, *arguments, str(reading)]
            super().__init__(command, pass_fds=(reading,), process_group=0, **options)
        finally:
            os.close(reading)


def end_with_parent(pipe: str) -> None:
    """Has the kernel kill this process and its group once nobody has the other end of a pipe. On Linux alone.

    It is a signal, so it also ends what never comes back to Python; and one that does not ask which thread of the
    parent ended, as ``PR_SET_PDEATHSIG`` does.
    """
    if sys.platform == "linux":
        reading = int(pipe)
        fcntl.fcntl(reading, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
        if select.select([reading], [], [], 0)[0]:  # it was gone before the kernel was asked
            os.killpg(0, signal.SIGKILL)

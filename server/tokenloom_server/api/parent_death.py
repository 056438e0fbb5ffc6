"""A process that ends with the process that started it.

As a program, ``parent_death.py PARENT_PID PROGRAM ARGUMENTS…`` starts another one like that: run as a file, in a Python
without site packages, this costs some 20 ms, and then becomes the program. The other way, a ``preexec_fn``, is not
safe beside threads. Only Linux can do this; elsewhere a process lives on all the same.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def hold(parent: int) -> None:
    """Asks the kernel to kill this process (SIGKILL) when the thread of ``parent`` that started it ends; ends it now
    where that has happened already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)


def main(arguments: list[str]) -> None:
    """Turns into the program."""
    parent, program = int(arguments[0]), arguments[1:]
    hold(parent)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])

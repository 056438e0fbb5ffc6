"""Starts a program that does not outlive the process which wants it: ``leash.py PARENT_PID PROGRAM ARGUMENTS…``.

Run as a file, in a Python without site packages, this costs some 20 ms, and then becomes the program.
The other way, a ``preexec_fn``, is not safe beside threads. Only Linux can do this; elsewhere the
program starts all the same.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Asks the kernel for a SIGKILL when the parent dies, and turns into the program."""
    parent, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was asked
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])

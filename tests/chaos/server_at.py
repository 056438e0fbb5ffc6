"""``tokenloom serve`` in a process that can be told to die, or to stop, at a named point; and mutants of it.

``main`` takes ``ARM_FILE MUTANT serve …`` as its arguments.

Points: ``NAME-before`` and ``NAME-after`` for every call of the ledger (``commit``, ``open``, ``claim_slot``,
``acquire``, ``pin``, ``save_snapshot`` …; *after* is before the answer reaches the server), ``snapshot`` (it is made,
and not yet saved or sent), ``forward`` (the pipeline went forward to a resume point, which is not yet used).

``ARM_FILE`` is looked at whenever a point is reached, so that a server can be armed while it runs: a JSON object
``{"point": …, "skip": n, "how": "SIGKILL" | "SIGSTOP" | "LOSE"}``. The process removes the file as it fires. ``LOSE``
is an answer that does not come: the call raises ``LedgerUnavailable``.

Nothing of this is in the product: modules are patched in this process, before it serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: By name: which line goes from which of the ledger's Lua scripts.
MUTANTS = {
    "fence": ("commit", "and is_present(ARGV[3])"),
    "deduplication": ("commit", "if index <= committed then return {1, field('sample_index')} end"),
}


class Points:
    """Fires when an armed point is reached."""

    def __init__(self, arm_file: Path) -> None:
        self._arm_file = arm_file
        self._lock = threading.Lock()

    def reached(self, point: str) -> None:
        with self._lock:
            try:
                armed = json.loads(self._arm_file.read_text(encoding="utf-8"))
            except FileNotFoundError:
                return
            if armed["point"] != point:
                return
            if armed["skip"]:
                arm(self._arm_file, point, armed["skip"] - 1, armed["how"])
                return
            self._arm_file.unlink()
            if armed["how"] == "LOSE":
                from tokenloom_server.errors import LedgerUnavailable

                raise LedgerUnavailable(f"the answer was lost ({point})")
            os.kill(os.getpid(), signal.Signals[armed["how"]])

    def around(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            point = arguments[0].verb if name == "execute" else name
            self.reached(f"{point}-before")
            found = method(*arguments, **named)
            self.reached(f"{point}-after")
            return found

        return call

    def behind(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            found = method(*arguments, **named)
            self.reached(name)
            return found

        return call


def arm(arm_file: Path, point: str, skip: int, how: str) -> None:
    """Arms the server that looks at ``arm_file``; as a whole, since it may be looking right now."""
    draft = arm_file.with_suffix(".draft")
    draft.write_text(json.dumps({"point": point, "skip": skip, "how": how}), encoding="utf-8")
    draft.replace(arm_file)


def disarm(arm_file: Path) -> bool:
    """Whether it was still armed."""
    with contextlib.suppress(FileNotFoundError):
        arm_file.unlink()
        return True
    return False


class _PointedLedger:
    """A ledger whose calls are points."""

    def __init__(self, ledger: Any, points: Points) -> None:
        self._ledger = ledger
        self._points = points

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)
        if callable(found) and name != "close":
            found = self._points.around(name, found)
            setattr(self, name, found)
        return found


def install(arm_file: Path, mutant: str) -> None:
    """Patches the server's modules in this process."""
    import tokenloom_server.api.server

    points = Points(arm_file)
    server: Any = tokenloom_server.api.server
    open_ledger = server.open_ledger

    def open_pointed(url: str, base_dir: Path) -> Any:
        from tokenloom_server.run.resume_points import ResumePoints
        from tokenloom_server.run.snapshots import Snapshots

        snapshots: Any = Snapshots
        resume_points: Any = ResumePoints
        snapshots.at = points.behind("snapshot", Snapshots.at)
        resume_points.forward = points.behind("forward", ResumePoints.forward)
        ledger: Any = open_ledger(url, base_dir)
        if mutant:
            script, line = MUTANTS[mutant]
            scripts = ledger._client._scripts
            assert line in scripts[script], (
                f"the mutant {mutant!r} finds nothing to remove in {script}.lua"
            )
            scripts[script] = scripts[script].replace(line, "")
        return _PointedLedger(ledger, points)

    server.open_ledger = open_pointed


def main() -> None:
    _, arm_file, mutant, *arguments = sys.argv
    install(Path(arm_file), mutant)
    from tokenloom_tools.__main__ import main as serve

    sys.argv = ["tokenloom", *arguments]
    serve()

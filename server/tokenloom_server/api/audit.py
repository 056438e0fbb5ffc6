"""The audit log: who changed what, and who was refused, a line each of the logger ``tokenloom.audit``."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenloom_server.core import caller
from tokenloom_server.core.control_characters import escaped
from tokenloom_server.reports.history import EventKind
from tokenloom_server.reports.stats import RevisionInfo, skips_text

if TYPE_CHECKING:
    from tokenloom_server.api.served_run import ServedRun
    from tokenloom_server.run.pins import PinnedPoint

_log = logging.getLogger("tokenloom.audit")

#: So many refusals have a line each within so many seconds; the next line says how many had none.
MOST_REFUSALS, REFUSALS_S = 10, 10.0


def said(what: str, change: str) -> None:
    """The present caller changed something."""
    who = caller.who.get()
    _log.info(
        "%s: %s; by %s%s",
        what,
        escaped(change),
        who.name,
        f" at {who.address}" if who.address else "",
    )


def changed(run: ServedRun, change: str, kind: EventKind = "audit") -> None:
    """The present caller changed a run, whose events have it, too; ``kind``: where they have one of it anyway."""
    said(f"run {run.coordinator.name}", change)
    run.recorder.note(kind, escaped(change), author=caller.who.get().name)


@contextmanager
def pinning(run: ServedRun) -> Iterator[None]:
    """While the present caller changes where a run's next launch begins."""
    before = run.coordinator.pins.pin
    yield
    after = run.coordinator.pins.pin
    changed(run, f"next launch: {_pin_text(after)} (before: {_pin_text(before)})", "pin")


def revision_text(revision: RevisionInfo) -> str:
    changes = "; ".join(revision.changes)
    return (
        f"{revision.number} from sample {revision.sample_index} on: {changes} ({revision.reason})"
    )


def _pin_text(pin: PinnedPoint | None) -> str:
    if pin is None:
        return "nothing pinned"
    return f"at sample {pin.sample_index}" + (
        f", skips {skips_text(dict(pin.skips))}" if pin.skips else ""
    )


class Refusals:
    """Calls that brought no token, or one that does not do; bounded, whoever calls how often."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST_REFUSALS)
        self._unsaid = 0

    def note(self, call: str, address: str, reason: str) -> None:
        now = time.monotonic()
        if len(self._times) == MOST_REFUSALS and now - self._times[0] < REFUSALS_S:
            self._unsaid += 1
            return
        self._times.append(now)
        more, self._unsaid = f" ({self._unsaid} more before)" if self._unsaid else "", 0
        _log.warning(
            "refused%s: %s from %s: %s", more, escaped(call[:200]), address, escaped(reason)
        )

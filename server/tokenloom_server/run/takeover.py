"""Who may open a run that somebody trains on: a takeover ends the present launch on purpose."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenloom_proto.process import is_gone

from tokenloom_server.errors import RunBusy
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.present_generation import PresentGeneration

_log = logging.getLogger(__name__)

#: Beyond the liveness, clients ask a busy run again for so long, seconds: their delays, and a slow machine's.
BUSY_MARGIN_S = 6.0


@dataclass(eq=False)
class Takeover:
    """Keeps a second launch, or a notebook, from ending a training run by mistake. Thread-safe."""

    _context: RunContext
    _present: PresentGeneration

    def refuse_busy(self, call: JoinCall) -> None:
        """Raises ``RunBusy`` where somebody trains, unless the call takes over."""
        name, liveness_s = self._context.name, self._context.timeouts.liveness_s
        trainer = self._trainer(call.process)
        if trainer is None:
            return
        if call.takeover:
            _log.warning("%s: attempt %s takes over: %s", name, call.attempt, trainer)
            return
        raise RunBusy(
            f"run {name!r} is busy: {trainer}. Wait until it has ended, look at the run with a PeekDataset, or end it "
            "on purpose with launch=LaunchOptions(takeover=True)",
            liveness_s + BUSY_MARGIN_S,
        )

    def _trainer(self, process: str) -> str | None:
        """Who trains on the run, if every rank of it was heard within ``liveness_s`` and rank 0 is of another process,
        which is not provably gone; None where nobody does."""
        with self._context.lock:
            active = self._present.active
            if (
                active is None
                or self._present.error is not None
                or (process and active.process == process)
            ):
                return None
            if not active.generation.slots[0].connected and is_gone(active.process):
                return None
            return active.trained_on(self._context.clock(), self._context.timeouts.liveness_s)

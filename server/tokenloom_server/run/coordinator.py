"""One live run: what its threads do together, as commands, and what others see of it, as immutable views.

    producer   pipeline → group         (``producer``, outside the lock)
    streams    group → messages         (the caller's threads, one per rank)
    committer  acknowledged → ledger    (``committer``, outside the lock)

One lock guards all that changes (``run_state``), and nobody but the coordinator takes it. The slow things happen
outside it, with one exception: while an opening is written nothing is sent, so that nothing reaches an older generation
once the new one is durable.
"""

from __future__ import annotations

import threading
import time

from tokenloom_server.errors import LedgerRolledBack, NotLeader, SourceError, TokenloomError
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.change_commands import ChangeCommands
from tokenloom_server.run.lease_commands import LeaseCommands
from tokenloom_server.run.stream_commands import StreamCommands
from tokenloom_server.run.work_commands import WorkCommands


class RunCoordinator(LeaseCommands, ChangeCommands, StreamCommands, WorkCommands):
    """Owns one run of this server. Thread-safe."""

    _workers: tuple[threading.Thread, ...] = ()

    def start(self, *workers: threading.Thread) -> None:
        """Starts the run's own threads; ``stop`` ends them."""
        self._workers = workers
        for worker in workers:
            worker.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends streams with ``ServerStopping``, commits what is acknowledged, ends the threads; bounded."""
        with self._lock:
            self._stopping = True
            self._wakes.everyone()
        self.order.io_stats.stop()
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def not_ready(self) -> str | None:
        """Why nobody can train on this server now; None where one can.

        An error that stopped the run does not count: the attempt that cures it has to reach this server, and so have
        other runs' ranks. Stats, metrics and log tell of it.
        """
        if not self.leads():
            return f"stands by: {self._lease.stands_by_for}"
        dead = next((worker.name for worker in self._workers if not worker.is_alive()), None)
        if dead is not None and not self._stopping:
            return f"its thread {dead} has ended; restart the server, and report its log"
        return f"the ledger is away: {self._ledger_error}" if self._ledger_error is not None else None

    # --- failures ----------------------------------------------------------------------------------

    def fail(self, active: ActiveGeneration, error: TokenloomError) -> None:
        """Stops the run with an error, if the generation is still the present one."""
        with self._lock:
            if active is self._active:
                self._stop_for_all(error)
            else:
                self._wakes.everyone()

    def on_commit_failed(self, active: ActiveGeneration, error: TokenloomError) -> None:
        """The ledger refused a commit of a generation for good."""
        if not isinstance(error, NotLeader | LedgerRolledBack):
            self.fail(active, error)
        elif active is self._active:
            self.on_lease_lost(error)

    def end_with_interpreter(self, active: ActiveGeneration) -> None:
        """As ``fail``, where this process is ending, which is nobody's fault."""
        with self._lock:
            if active is self._active:
                self._error = SourceError(
                    "this process ends with its main thread, so no more samples are read: let that wait for the one "
                    "that trains"
                )
            self._wakes.everyone()

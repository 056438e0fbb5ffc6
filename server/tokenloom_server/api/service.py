"""The runs of one server: brought up, looked after, and closed together."""

from __future__ import annotations

import logging
import time
import uuid
from pathlib import Path

from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.differences import began_with, differences, refuse
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.errors import ConfigError, LimitExceeded, NotFound
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import as_file, parsed
from tokenloom_server.order.origin import Origin
from tokenloom_server.order.revision import differences_of_files
from tokenloom_server.order.segments import measured_ahead
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.reports.stats import NextLaunch
from tokenloom_server.run.committer import Committer
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.history import History
from tokenloom_server.run.leadership import Leadership
from tokenloom_server.run.producer import Producer
from tokenloom_server.run.streams import Streams
from tokenloom_server.run.timeouts import Timeouts

_log = logging.getLogger(__name__)

#: How long the runs' threads get to commit what is acknowledged and to end, seconds.
STOP_S = 5.0
#: How long the end waits until the ledger has heard that the leases are let go, seconds.
LET_GO_S = 2.0
#: Each has its threads, its window of samples, and a tokeniser.
MAX_RUNS = 64
_ANYWHERE = DataRoots()


class Runs:
    """The runs of a server, by name. What is asked of one run is asked of its ``ServedRun``.

    Calls may come from any thread, and may block for one round trip of the ledger; those that go forward to a sample
    take as long as that takes.
    """

    def __init__(
        self,
        ledger: Ledger,
        holder: str | None = None,
        timeouts: Timeouts | None = None,
        *,
        standby: bool = False,
        data_roots: DataRoots = _ANYWHERE,
        catalog: Catalog | None = None,
    ) -> None:
        """``holder`` names this server in the ledger: equal for its own restart, and for no other server.

        ``standby``: where another server leads a run, wait for its lease instead of refusing to start.
        ``catalog``: what mixture files are read against; all that this release knows if not given.
        """
        self._ledger = ledger
        self._holder = holder or uuid.uuid4().hex
        self._timeouts = timeouts or Timeouts()
        self._standby = standby
        self._data_roots = data_roots
        self._catalog = catalog or open_catalog()
        self._runs: dict[str, ServedRun] = {}

    def add(self, path: Path, index_dir: Path | None, revise: str | None = None) -> ServedRun:
        """Brings up the run of a mixture file; see ``add_mixture``."""
        return self.add_mixture(
            config.load(path, self._catalog), path.resolve().parent, index_dir, revise, where=str(path)
        )

    def add_mixture(
        self, mixture: RunConfig, base_dir: Path, index_dir: Path | None, revise: str | None = None, *, where: str
    ) -> ServedRun:
        """Brings up the run of a mixture: a new one is recorded, a known one is taken over once its lease lapsed.
        ``where`` says in errors where the mixture stands.

        ``revise``: where the mixture differs from the one in force, why that is to be a revision.

        Raises ``LeaseHeld`` where another server leads it (unless on standby), what ``config.load``, ``builder.create``
        and ``builder.load`` raise, and the ledger's errors.
        """
        if len(self._runs) >= MAX_RUNS:
            raise LimitExceeded(
                f"{where}: this server has {len(self._runs)} runs, and one serves at most {MAX_RUNS}; start another"
            )
        if mixture.run in self._runs:
            raise ConfigError(
                f"{where}: run {mixture.run!r} is served already, from another file; give each run its own name"
            )
        stored = self._ledger.read_run(mixture.run, TRAIN)
        factory = None
        if stored is None:
            factory = measured_ahead(builder.create(mixture, base_dir, index_dir, self._data_roots))
            stored = self._ledger.create_run(mixture.run, TRAIN, uuid.uuid4().hex, factory.record.to_json())
        change = None
        if factory is None or factory.record.to_json() != stored.record:
            # An older run; or another server has created it in between, from other files perhaps.
            factory, change = self._load(mixture, base_dir, index_dir, stored, revise)
        for warning in builder.warnings(factory.record):
            _log.warning("%s: %s", mixture.run, warning)
        streams = Streams.of(factory, mixture, self._ledger)
        coordinator = RunCoordinator(factory, self._ledger, stored.uid, self._timeouts, lease_clock=self._ledger.clock)
        leadership = Leadership(coordinator, self._holder)
        if not self._standby:
            leadership.wait_to_lead()
        served = ServedRun(coordinator, leadership, streams, self._history_of)
        self._runs[mixture.run] = served
        coordinator.start(Producer(coordinator), Committer(coordinator))
        leadership.start()
        if change is not None:
            served.revision_handler.revise_soon(change)
        return served

    def _load(
        self, mixture: RunConfig, base_dir: Path, index_dir: Path | None, stored: StoredRun, revise: str | None
    ) -> tuple[PipelineFactory, MixtureChange | None]:
        """The order of a known run, and the change that its mixture file asks for."""
        different = differences(mixture, stored.record)
        if not different and revise is None:
            return builder.load(mixture, base_dir, index_dir, stored.record, self._data_roots), None
        refuse(mixture, {field: both for field, both in different.items() if not field.startswith("mixture.")})
        factory = builder.load(began_with(mixture, stored.record), base_dir, index_dir, stored.record, self._data_roots)
        openings = self._ledger.openings(stored.uid, stored.stream)
        origin = Origin.from_json(openings[0].parent_run) if openings else None
        timeline = Timeline(factory, self._ledger.revisions(stored.uid, stored.stream), origin)
        in_force = timeline.of_state(stored.committed.state if stored.committed is not None else "").as_revised()
        # A file that was brought up to date after a revision differs from the record, and from nothing in force.
        if not differences_of_files(in_force, mixture):
            return factory, None
        if revise is None:
            refuse(mixture, different)
        if self._standby:
            raise ConfigError(
                f"the mixture file of run {mixture.run!r} differs from the mixture in force, and a server that stands "
                "by cannot revise it: start it without --standby, or without --revise and with the old file"
            )
        assert revise is not None
        change = {"reason": revise, "author": "tokenloom serve --revise", "mixture": as_file(mixture)}
        return factory, parsed(MixtureChange, change, "--revise", self._catalog)

    def _history_of(self, run: str) -> History | None:
        served = self._runs.get(run)
        return served.history if served is not None else None

    def get(self, run: str) -> ServedRun:
        """Raises ``NotFound``, naming the runs that are served."""
        served = self._runs.get(run)
        if served is None:
            known = ", ".join(sorted(self._runs)) or "none"
            raise NotFound(f"there is no run {run!r} on this server; it serves: {known}")
        return served

    def stop(self) -> None:
        """Commits what is acknowledged and ends every run's threads; bounded."""
        # All are asked to end first, so that they end side by side: the bound is one for all of them.
        for served in self._runs.values():
            served.coordinator.stop(0.0)
        deadline = time.monotonic() + STOP_S
        for served in self._runs.values():
            served.peeks.stop()
            served.evaluations.stop()
            served.coordinator.stop(max(0.0, deadline - time.monotonic()))
        # After the last commits, and again side by side: a ledger that hangs is waited for once.
        for served in self._runs.values():
            served.leadership.end(0.0)
        deadline = time.monotonic() + LET_GO_S
        for served in self._runs.values():
            served.leadership.end(max(0.0, deadline - time.monotonic()))
            served.coordinator.order.resources.close()

    def names(self) -> list[str]:
        return sorted(self._runs)

    def not_ready(self) -> str | None:
        """Why no run can be served now; None where one can. What keeps one run from it stands in that run's stats, and
        is no reason to send the ranks of the others away."""
        reasons = {name: served.coordinator.not_ready() for name, served in list(self._runs.items())}
        if None in reasons.values():
            return None
        return "; ".join(f"run {name}: {reason}" for name, reason in reasons.items()) or "no run is served yet"

    def fork(
        self, run: str, *, parent: str | None = None, sample_index: int | None = None, text: str | None = None
    ) -> NextLaunch:
        """Pins where a run that has not begun begins: where ``parent`` stood at a sample index (None: the committed
        one), or as the snapshot ``text`` of another run says. Raises ``ConfigError``, ``NotFound``, ``BeyondHorizon``.
        """
        served = self.get(run)
        served.coordinator.require_lead()
        if (parent is None) == (text is None):
            raise ConfigError("a fork names the run that it begins from, or brings a snapshot of it: give one of them")
        if parent is not None:
            text, _ = self.get(parent).snapshots.take(sample_index, save=False)
        elif sample_index is not None:
            raise ConfigError("a snapshot has its own sample index: leave sample_index out")
        assert text is not None
        return served.start_points.fork(text)

"""The runs of one server: brought up, looked after, and closed together."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenloom_server.catalog import open_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.differences import began_with, differences, refuse
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import ConfigError, LimitExceeded, NotFound
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import StoredRun, StoredSnapshot
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.revision import as_file, differences_of_files, places
from tokenloom_server.order.timeline import Origin, Timeline
from tokenloom_server.planning.plan import RunPlan
from tokenloom_server.planning.planner import Planner
from tokenloom_server.replay.evaluation import Evaluations
from tokenloom_server.replay.peek import Peeks
from tokenloom_server.replay.receipts import Receipts, revision_info
from tokenloom_server.replay.trace import Traces
from tokenloom_server.reports.receipt import Receipt, RevisionInfo, RunReport
from tokenloom_server.reports.stats import MixtureInfo, PhaseInfo, ResumePoint, RunLosses, RunStats, SnapshotInfo
from tokenloom_server.reports.trace import TracedSample, TracedStep
from tokenloom_server.run.committer import Committer
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.fork import Forking
from tokenloom_server.run.history import History
from tokenloom_server.run.join import JoinHandler
from tokenloom_server.run.leadership import Leadership
from tokenloom_server.run.losses import Losses
from tokenloom_server.run.producer import Producer
from tokenloom_server.run.revise import Revising
from tokenloom_server.run.stats import StatsReader
from tokenloom_server.run.streams import Streams
from tokenloom_server.run.timeouts import Timeouts

_log = logging.getLogger(__name__)

#: How long the runs' threads get to commit what is acknowledged and to end, seconds.
STOP_S = 5.0
#: How long the end waits until the ledger has heard that the leases are let go, seconds.
LET_GO_S = 2.0
#: Each has its threads, its window of samples, and a tokeniser.
MAX_RUNS = 64
#: In the ledger, of one run. Each may be as large as its state, and the list of them is read as a whole.
MAX_SAVED_SNAPSHOTS = 1000
#: A restore goes forward through what it skips: at some ten million tokens a second that takes half an hour.
MAX_SKIPPED_TOKENS = 2**34
_ANYWHERE = DataRoots()


class ServedRun:
    """One run with everything that answers for it."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        leadership: Leadership,
        streams: Streams,
        other: Callable[[str], History | None] = lambda run: None,
    ) -> None:
        """``other`` finds another run of the server, for forks."""
        self.coordinator = coordinator
        self.leadership = leadership
        self.history = History(coordinator)
        self.revising = Revising(coordinator)
        self.forking = Forking(coordinator, self.history, other)
        self.join_handler = JoinHandler(coordinator, self.history, self.revising, self.forking)
        self.losses = Losses(coordinator)
        self.stats = StatsReader(coordinator, self.losses)
        self.peeks = Peeks(coordinator, self.history)
        self.evaluations = Evaluations(coordinator, streams)
        self.planner = Planner()
        self.accounts = Receipts(coordinator, self.history, self.peeks, self.stats)
        self.traces = Traces(coordinator, self.history, self.peeks, self.evaluations)


class Runs:
    """Implements ``stats.RunService``."""

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
        self._refuse_one_too_many(str(path))
        return self.add_mixture(
            config.load(path, self._catalog), path.resolve().parent, index_dir, revise, where=str(path)
        )

    def add_mixture(
        self, found: RunConfig, base_dir: Path, index_dir: Path | None, revise: str | None = None, *, where: str
    ) -> ServedRun:
        """Brings up the run of a mixture: a new one is recorded, a known one is taken over once its lease lapsed.
        ``where`` says in errors where the mixture stands.

        ``revise``: where the mixture differs from the one in force, why that is to be a revision.

        Raises ``LeaseHeld`` where another server leads it (unless on standby), what ``config.load``, ``builder.create``
        and ``builder.load`` raise, and the ledger's errors.
        """
        self._refuse_one_too_many(where)
        if found.run in self._runs:
            raise ConfigError(
                f"{where}: run {found.run!r} is served already, from another file; give each run its own name"
            )
        stream = TRAIN
        stored = self._ledger.read_run(found.run, stream)
        order = None
        if stored is None:
            order = builder.create(found, base_dir, index_dir, self._data_roots)
            stored = self._ledger.create_run(found.run, stream, uuid.uuid4().hex, order.record.to_json())
        change = None
        if order is None or order.record.to_json() != stored.record:
            # An older run; or another server has created it in between, from other files perhaps.
            order, change = self._load(found, base_dir, index_dir, stored, revise)
        for warning in builder.warnings(order.record):
            _log.warning("%s: %s", found.run, warning)
        streams = Streams.of(order, found, self._ledger)
        coordinator = RunCoordinator(order, self._ledger, stored.uid, self._timeouts)
        leadership = Leadership(coordinator, self._holder)
        if not self._standby:
            leadership.wait_to_lead()
        served = ServedRun(coordinator, leadership, streams, self._history_of)
        self._runs[found.run] = served
        coordinator.start(Producer(coordinator), Committer(coordinator))
        leadership.start()
        if change is not None:
            served.revising.revise(change)
        return served

    def _refuse_one_too_many(self, where: str) -> None:
        if len(self._runs) >= MAX_RUNS:
            raise LimitExceeded(
                f"{where}: this server has {len(self._runs)} runs, and one serves at most {MAX_RUNS}; start another"
            )

    def _load(
        self, found: RunConfig, base_dir: Path, index_dir: Path | None, stored: StoredRun, revise: str | None
    ) -> tuple[PipelineFactory, MixtureChange | None]:
        """The order of a known run, and the change that its mixture file asks for."""
        different = differences(found, stored.record)
        if not different and revise is None:
            return builder.load(found, base_dir, index_dir, stored.record, self._data_roots), None
        refuse(found, {field: both for field, both in different.items() if not field.startswith("mixture.")})
        order = builder.load(began_with(found, stored.record), base_dir, index_dir, stored.record, self._data_roots)
        openings = self._ledger.openings(stored.uid, stored.stream)
        origin = Origin.from_json(openings[0].parent_run) if openings else None
        timeline = Timeline(order, self._ledger.revisions(stored.uid, stored.stream), origin)
        in_force = timeline.as_revised()
        # A file that was brought up to date behind a revision differs from the record, and from nothing in force.
        if not differences_of_files(in_force, found):
            return order, None
        if revise is None:
            refuse(found, different)
        if self._standby:
            raise ConfigError(
                f"the mixture file of run {found.run!r} differs from the mixture in force, and a server that stands by "
                "cannot revise it: start it without --standby, or without --revise and with the old file"
            )
        assert revise is not None
        return order, MixtureChange(reason=revise, author="tokenloom serve --revise", mixture=as_file(found))

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
        # All are told first, so that they end side by side: the bound is one for all of them.
        for served in self._runs.values():
            served.coordinator.stop(0.0)
        deadline = time.monotonic() + STOP_S
        for served in self._runs.values():
            served.peeks.stop()
            served.evaluations.stop()
            served.coordinator.stop(max(0.0, deadline - time.monotonic()))
        # Behind the last commits, and again side by side: a ledger that hangs is waited for once.
        for served in self._runs.values():
            served.leadership.end(0.0)
        deadline = time.monotonic() + LET_GO_S
        for served in self._runs.values():
            served.leadership.end(max(0.0, deadline - time.monotonic()))
            served.coordinator.order.resources.close()

    # --- stats.RunService --------------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted(self._runs)

    def stats(self, run: str) -> RunStats:
        return self.get(run).stats.read()

    def losses(self, run: str) -> RunLosses:
        return self.get(run).losses.read()

    def plan(self, run: str, until_tokens: int | None) -> RunPlan:
        served = self.get(run)
        view = served.coordinator.view()
        return served.planner.plan(view.timeline, view.state, until_tokens)

    def plan_from_start(self, run: str, until_tokens: int | None) -> RunPlan:
        """The plan from the run's beginning, endless or not: what a trainer's budget is made of. As it does not look at
        how far the run is, all ranks are told the same, and those of a later launch, too."""
        served = self.get(run)
        timeline = served.coordinator.timeline
        return served.planner.plan(timeline, timeline.initial(), until_tokens or MAX_COUNTER)

    def receipt(self, run: str, sample_index: int | None) -> Receipt:
        return self.get(run).accounts.receipt(sample_index)

    def report(self, run: str) -> RunReport:
        return self.get(run).accounts.report()

    def snapshot(self, run: str, sample_index: int | None, save: bool) -> tuple[str, str | None]:
        served = self.get(run)
        coordinator = served.coordinator
        coordinator.require_lead()
        if (
            save
            and (saved := len(coordinator.ledger.snapshots(coordinator.uid, coordinator.stream))) >= MAX_SAVED_SNAPSHOTS
        ):
            raise LimitExceeded(
                f"run {run!r} has {saved} saved snapshots, and the ledger keeps at most {MAX_SAVED_SNAPSHOTS}; take "
                "this one without saving it (the Snapshot RPC), or out of a trainer's checkpoint"
            )
        text, index = served.history.snapshot(sample_index)
        if not save:
            return text, None
        snapshot_id = f"{index}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        coordinator.ledger.save_snapshot(
            coordinator.uid,
            coordinator.stream,
            StoredSnapshot(id=snapshot_id, sample_index=index, saved_at=time.time(), text=text),
        )
        return text, snapshot_id

    def snapshots(self, run: str) -> list[SnapshotInfo]:
        coordinator = self.get(run).coordinator
        return [
            SnapshotInfo(id=entry.id, sample_index=entry.sample_index, saved_at=entry.saved_at)
            for entry in coordinator.ledger.snapshots(coordinator.uid, coordinator.stream)
        ]

    def saved_snapshot(self, run: str, snapshot_id: str) -> str:
        coordinator = self.get(run).coordinator
        found = coordinator.ledger.snapshot(coordinator.uid, coordinator.stream, snapshot_id)
        if found is None:
            raise NotFound(f"run {run!r} has no snapshot {snapshot_id!r}; GET /v1/runs/{run}/snapshots lists them")
        return found.text

    def restore(
        self,
        run: str,
        *,
        snapshot_id: str | None = None,
        sample_index: int | None = None,
        text: str | None = None,
        skip_samples: int = 0,
        skip_tokens: int = 0,
    ) -> ResumePoint:
        served = self.get(run)
        given: Sequence[object] = [value for value in (snapshot_id, sample_index, text) if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a restore names one of snapshot id, sample index and snapshot, but {len(given)} are given"
            )
        if skip_samples and skip_tokens:
            raise ConfigError(f"a restore skips {skip_samples} samples and {skip_tokens} tokens: give one of them")
        if snapshot_id is not None:
            text = self.saved_snapshot(run, snapshot_id)
        elif sample_index is not None:
            text, _ = served.history.snapshot(sample_index)
        assert text is not None
        coordinator = served.coordinator
        coordinator.require_lead()
        point = served.history.parse(text)
        stored = coordinator.ledger.read_run(run, coordinator.stream)
        if stored is not None:
            served.history.refuse_foreign(point, stored)
        timeline, begin = coordinator.timeline, point.sample_index
        skip = skip_samples or timeline.index_at(timeline.tokens_at(begin) + skip_tokens) - begin
        tokens = timeline.tokens_at(begin + skip) - timeline.tokens_at(begin)
        if tokens > MAX_SKIPPED_TOKENS:
            raise LimitExceeded(
                f"{skip} samples with {tokens} tokens are to be skipped; one restore goes forward through "
                f"{MAX_SKIPPED_TOKENS} at most"
            )
        pin = served.peeks.pin(text, skip)
        for note in point.notes:
            _log.info("%s: %s", run, note)
        coordinator.ledger.pin(coordinator.uid, coordinator.stream, coordinator.lease.epoch, pin)
        start = point.sample_index + skip
        _log.info("%s: the next generation starts at sample %d, and %d are skipped (pinned)", run, start, skip)
        digest = point.digest or served.history.pinned(pin).point.digest
        assert digest is not None, "what is pinned has been gone forward to"
        return ResumePoint(sample_index=point.sample_index, digest=digest, skipped_samples=skip, start_index=start)

    def trace_sample(
        self, run: str, index: int, *, generation: int | None = None, text: bool = False, stream: str = TRAIN
    ) -> TracedSample:
        if stream != TRAIN:
            if generation is not None:
                raise ConfigError(f"generation: a stream that is evaluated on ({stream!r}) has none; leave it out")
            return self.get(run).traces.evaluated(stream, index, text)
        return self.get(run).traces.sample(index, generation, text)

    def trace_step(
        self, run: str, step: int, *, rank: int | None = None, generation: int | None = None, text: bool = False
    ) -> TracedStep:
        return self.get(run).traces.step(step, rank, generation, text)

    def fork(
        self, run: str, *, parent: str | None = None, sample_index: int | None = None, text: str | None = None
    ) -> ResumePoint:
        served = self.get(run)
        coordinator = served.coordinator
        coordinator.require_lead()
        if (parent is None) == (text is None):
            raise ConfigError("a fork names the run that it begins from, or brings a snapshot of it: give one of them")
        if parent is not None:
            self.get(parent).coordinator.require_lead()
            text, _ = self.get(parent).history.snapshot(sample_index)
        elif sample_index is not None:
            raise ConfigError("a snapshot has its own sample index: leave sample_index out")
        assert text is not None
        stored = coordinator.ledger.read_run(run, coordinator.stream)
        if stored is not None and stored.opening is not None:
            raise ConfigError(
                f"run {run!r} has begun (generation {stored.opening.generation}), and a fork is a new run: give it "
                "another name in its mixture file"
            )
        own = served.forking.fork(text)
        coordinator.ledger.pin(coordinator.uid, coordinator.stream, coordinator.lease.epoch, served.peeks.pin(own, 0))
        point = served.history.parse(own)
        assert point.digest is not None, "a fork begins from a snapshot"
        _log.info("%s: begins at sample %d, forked (pinned)", run, point.sample_index)
        return ResumePoint(
            sample_index=point.sample_index,
            digest=point.digest,
            skipped_samples=0,
            start_index=point.sample_index,
        )

    def mixture(self, run: str) -> MixtureInfo:
        view = self.get(run).coordinator.view()
        timeline, index = view.timeline, view.commit.sample_index
        config = timeline.at(index).config
        return MixtureInfo(
            run=run,
            sample_index=index,
            sequence_length=config.sequence_length,
            mixture=as_file(config),
            paused=[
                place if isinstance(child, NodeConfig) and child.alias is None else child.name
                for place, child in places(config)
                if child.presence == "paused"
            ],
            dropped=[source.name for source in config.sources if source.presence == "dropped"],
            phases=[
                PhaseInfo(
                    number=segment.phase,
                    sample_index=segment.begin,
                    total_tokens=segment.tokens,
                    sequence_length=segment.order.config.sequence_length,
                )
                for segment in timeline.segments
                if segment.phase is not None
            ],
            revisions=[revision_info(timeline, revision, index) for revision in timeline.revisions],
            first_revisable=view.first_revisable,
        )

    def revise(self, run: str, change: MixtureChange) -> RevisionInfo:
        served = self.get(run)
        revision = served.revising.revise(change)
        return revision_info(served.coordinator.timeline, revision, served.coordinator.committed_through)

    def drop_revisions(self, run: str, number: int) -> list[RevisionInfo]:
        served = self.get(run)
        timeline = served.coordinator.timeline
        return [revision_info(timeline, revision, 0) for revision in served.revising.drop(number)]

    def not_ready(self) -> str | None:
        for run, served in self._runs.items():
            reason = served.coordinator.not_ready()
            if reason is not None:
                return f"run {run}: {reason}"
        return None if self._runs else "no run is served yet"

"""The runs of one server: brought up, where they are recorded or taken over; added, reloaded, removed, and closed
together."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenloom_server.api import audit
from tokenloom_server.api.mixture_origin import MixtureOrigin
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.order_fields import began_with, differences, refuse
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core import caller
from tokenloom_server.core.measures import LabelledCounter
from tokenloom_server.errors import (
    ConfigError,
    Forbidden,
    LimitExceeded,
    NotFound,
    NotLeader,
    RunBusy,
    ServerStopping,
    TokenloomError,
    reason,
)
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import as_file, parsed
from tokenloom_server.order.notes import label_notes
from tokenloom_server.order.revision import differences_of_files
from tokenloom_server.order.segments import Origin, measured_ahead
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.reports.stats import NextLaunch
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.evaluation_streams import EvaluationStreams
from tokenloom_server.run.resume_points import ResumePoints
from tokenloom_server.run.timeouts import Timeouts
from tokenloom_server.storage.io_stats import waits_said

if TYPE_CHECKING:
    from tokenloom_server.config.mixture_change import MixtureChange
    from tokenloom_server.workers.cluster.readers.link import RayReaders

_log = logging.getLogger(__name__)

_ANYWHERE = DataRoots()


class Reason(NamedTuple):
    """Why a mixture that differs from the one in force is to be a revision, and who asks for it."""

    text: str
    author: str = "tokenloom serve --revise"


@dataclass(eq=False)
class RunStarter:
    """Makes runs of one server from their mixtures, still to be led."""

    ledger: Ledger
    #: Names this server in the ledger: equal for its own restart, and for no other server.
    holder: str
    timeouts: Timeouts
    #: Where another server leads a run, wait for its lease instead of refusing to start.
    standby: bool = False
    data_roots: DataRoots = _ANYWHERE
    #: What mixture files are read against; all that this release knows if not given.
    catalog: Catalog = field(default_factory=open_catalog)
    #: Who reads text, if not this process.
    readers: RayReaders | None = None

    def prepare(
        self,
        mixture: RunConfig,
        origin: MixtureOrigin,
        reason: Reason | None,
        other: Callable[[str], ResumePoints | None],
    ) -> tuple[ServedRun, MixtureChange | None]:
        """A run that is still to be led, and the change that its mixture asks for: a new run is recorded, a known one
        compared with its record. ``other`` finds another run of the server, for forks.

        Raises what ``builder.create`` and ``builder.load`` raise, and the ledger's errors."""
        with waits_said(mixture.run):
            return self._prepare(mixture, origin, reason, other)

    def _prepare(
        self,
        mixture: RunConfig,
        origin: MixtureOrigin,
        reason: Reason | None,
        other: Callable[[str], ResumePoints | None],
    ) -> tuple[ServedRun, MixtureChange | None]:
        stored = self.ledger.read_run(mixture.run, TRAIN)
        factory = None
        if stored is None:
            factory = measured_ahead(
                builder.create(mixture, origin.base_dir, origin.index_dir, self.data_roots)
            )
            stored = self.ledger.create_run(
                mixture.run, TRAIN, uuid.uuid4().hex, factory.record.to_json()
            )
        change = None
        if factory is None or factory.record.to_json() != stored.record:
            # An older run; or another server has created it in between, from other files perhaps.
            factory, change = self._load(mixture, origin, stored, reason)
        if self.readers is not None:
            self.readers.check(factory)
            factory.resources.readers = self.readers
        for warning in builder.warnings(factory):
            _log.warning("%s: %s", mixture.run, warning)
        # A source that cannot be read says so where the run reads it.
        with suppress(TokenloomError):
            for is_warning, note in label_notes(factory):
                _log.log(
                    logging.WARNING if is_warning else logging.INFO, "%s: %s", mixture.run, note
                )
        streams = EvaluationStreams.of(factory, mixture, self.ledger)
        context = RunContext(factory, self.ledger, self.timeouts, lease_clock=self.ledger.clock)
        coordinator = RunCoordinator(context, stored.uid, self.holder)
        return ServedRun(coordinator, streams, other, origin, mixture), change

    def _load(
        self, mixture: RunConfig, origin: MixtureOrigin, stored: StoredRun, reason: Reason | None
    ) -> tuple[PipelineFactory, MixtureChange | None]:
        """The order of a known run, and the change that its mixture file asks for."""
        different = differences(mixture, json.loads(stored.record))
        places = origin.base_dir, origin.index_dir, stored.record, self.data_roots
        if not different and reason is None:
            return builder.load(mixture, *places), None
        refuse(
            mixture,
            {field: both for field, both in different.items() if not field.startswith("mixture.")},
        )
        factory = builder.load(began_with(mixture, stored.record), *places)
        openings = self.ledger.openings(stored.uid, stored.stream)
        parent = Origin.from_json(openings[0].parent_run) if openings else None
        timeline = Timeline(factory, self.ledger.revisions(stored.uid, stored.stream), parent)
        in_force = timeline.of_state(
            stored.committed.state if stored.committed is not None else ""
        ).as_revised()
        # A file that was brought up to date after a revision differs from the record, and from nothing in force.
        if not differences_of_files(in_force, mixture):
            return factory, None
        if reason is None:
            refuse(mixture, different)
        if self.standby:
            raise ConfigError(
                f"the mixture file of run {mixture.run!r} differs from the mixture in force, and a server that stands "
                "by cannot revise it: start it without --standby, or without --revise and with the old file"
            )
        assert reason is not None
        # Not at the top: its models are built as they are imported, which takes 6 ms, and few starts revise.
        from tokenloom_server.config.mixture_change import MixtureChange

        change = {"reason": reason.text, "author": reason.author, "mixture": as_file(mixture)}
        return factory, parsed(MixtureChange, change, "--revise", self.catalog)


#: How long the runs' threads get to commit what is acknowledged and to end, seconds.
STOP_S = 5.0
#: How long the end waits until the histories have what happened last, seconds; what is not written by then is lost.
RECORD_S = 1.0
#: How long the end waits until the ledger has heard that the leases are let go, seconds.
LET_GO_S = 2.0
#: How long the streams of a run that is removed get to say why they end, seconds.
GOODBYE_S = 2.0
#: Each has its threads, its window of samples, and a tokeniser.
MAX_RUNS = 64


class RunProblem(NamedTuple):
    """Why a mixture is not served, or not as its file has it now."""

    run: str
    """Its name, or that of its file where this says none."""
    origin: MixtureOrigin
    error: TokenloomError


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
        on_change: Callable[[], None] = lambda: None,
        require_room: Callable[[int], None] = lambda sources: None,
        **options: Any,
    ) -> None:
        """``options``: see ``RunStarter``. ``on_change`` is called where a run was added or removed; ``require_room``
        raises ``ConfigError`` where the files of so many sources cannot be open."""
        #: This process, for who compares what answers at two ports.
        self.identity = uuid.uuid4().hex
        self._starter = RunStarter(
            ledger, holder or self.identity, timeouts or Timeouts(), **options
        )
        self._runs: dict[str, ServedRun] = {}
        self._on_change, self._require_room = on_change, require_room
        #: By where their mixtures stand.
        self._problems: dict[str, RunProblem] = {}
        self._lock = threading.Lock()
        #: Runs that are being added, reloaded or removed.
        self._changing: set[str] = set()
        self._stopping = False
        #: Calls that ended with an error, by method, status and the error's name.
        self.rpc_errors = LabelledCounter(threading.Lock())

    # --- added, reloaded, removed ---------------------------------------------------------------------

    def add(self, path: Path, index_dir: Path | None, reason: Reason | None = None) -> ServedRun:
        """Brings up the run of a mixture file; see ``add_from``."""
        return self.add_from(MixtureOrigin.of_file(path, index_dir), reason)

    def add_from(self, origin: MixtureOrigin, reason: Reason | None = None) -> ServedRun:
        """Brings up the run of a mixture: a new one is recorded, a known one is taken over once its lease lapsed.

        ``reason``: where the mixture differs from the one in force, why that is to be a revision.

        Raises ``LeaseHeld`` where another server leads it (unless on standby), ``RunBusy`` where somebody else changes
        it just now, what ``config.load``, ``builder.create`` and ``builder.load`` raise, and the ledger's errors.
        """
        mixture = origin.load(self._starter.catalog)
        with self._change(mixture.run):
            if mixture.run in self._runs:
                raise ConfigError(
                    f"{origin.where}: run {mixture.run!r} is served already, from "
                    f"{self._runs[mixture.run].origin.where}; give each run its own name"
                )
            if len(self._runs.keys() | self._changing) > MAX_RUNS:
                raise LimitExceeded(
                    f"{origin.where}: this server has {len(self._runs)} runs, and one serves at most {MAX_RUNS}; start "
                    "another"
                )
            self._require_room(
                len(mixture.sources) + sum(len(run.config.sources) for run in self.served())
            )
            served = self._begin(
                *self._starter.prepare(mixture, origin, reason, self._resume_points_of)
            )
        self._problems.pop(origin.where, None)
        audit.said(f"run {served.name}", f"added, of {origin.where}")
        self._tell()
        return served

    def reload(self, name: str, reason: Reason | None = None) -> str:
        """Reads the mixture of a run again. One that could not be brought up is tried again. One that is served gets a
        difference as a revision, for a ``reason``, while it trains; other fields that decide no order hold once it was
        taken up anew, for which its streams end and begin again. Where nothing changed, nothing is done. Returns what
        came of it, for people.

        Raises what ``add_from`` and ``RevisionHandler.revise`` raise; what is served goes on as it was then.
        """
        if name not in self._runs:
            self.add_from(self.origin(name), reason)
            return "It is served as its mixture file stands now."
        with self._change(name):
            served = self._runs[name]
            mixture = served.origin.load(self._starter.catalog)
            if mixture.run != name:
                raise ConfigError(
                    f"{served.origin.where}: run: found {mixture.run!r}, but run {name!r} is served from this file; "
                    "put its name back, or remove that run and add the file again"
                )
            if mixture != served.config or served.coordinator.not_ready() is not None:
                served, note = self._reload(served, mixture, reason)
                self._free()
            elif served.origin.file and not served.origin.file.stat().st_nlink:
                note = (
                    "Nothing is new: the file was replaced, and this server sees the former one, as a container does "
                    "that has the file mounted. Start the container again, or mount the file's folder."
                )
            else:
                note = "Nothing is new in the file."
            self._problems.pop(served.origin.where, None)
            why = reason.text if reason is not None else "no reason given"
            audit.changed(served, f"reloaded, of {served.origin.where} ({why})", "revision")
            return note

    def remove(self, name: str) -> MixtureOrigin:
        """Ends a run on this server: commits what is acknowledged, lets its lease go, and ends its streams with
        ``NotFound``. The ledger keeps all of it: where it is added again, here or elsewhere, it goes on.

        Returns where its mixture stands. Raises ``NotFound``, ``RunBusy``.
        """
        origin = self.origin(name)
        with self._change(name):
            served = self._runs.pop(name, None)
            before = "served" if served is not None else "not served"
            if served is not None:
                message = (
                    f"run {name!r} was removed from this server; the ledger keeps it: add it again, and restart the "
                    "training job from its last checkpoint"
                )
                self._end([served], NotFound(message))
                del served
                self._free()
            self._problems.pop(origin.where, None)
        audit.said(
            f"run {name}", f"removed; the ledger keeps it (before: {before}, of {origin.where})"
        )
        self._tell()
        return origin

    def follow(self, origin: MixtureOrigin, reason: Reason | None = None) -> TokenloomError | None:
        """Serves a mixture as it stands now: its run is added, or reloaded. What it meets is logged, kept as the
        mixture's problem until it is mended, and returned; the other runs go on."""
        name = self._name_at(origin)
        try:
            if name is not None:
                self.reload(name, reason)
            else:
                name = self.run_of(origin)
                self.add_from(origin, reason)
        except Exception as error:
            name = name or origin.name
            problem = self._note(name, origin, error)
            line = "%s: not taken from %s: %s: %s"
            _log.error(
                line, name, origin.where, problem.name, problem, exc_info=problem is not error
            )
            return problem
        return None

    def forget(self, origin: MixtureOrigin) -> TokenloomError | None:
        """Removes what is served of a mixture that is gone; returns ``RunBusy`` where that has to wait."""
        name = self._name_at(origin)
        try:
            if name is not None:
                self.remove(name)
        except RunBusy as error:
            return error
        self._problems.pop(origin.where, None)
        return None

    def _name_at(self, origin: MixtureOrigin) -> str | None:
        return next((run.name for run in self.served() if run.origin.where == origin.where), None)

    def run_of(self, origin: MixtureOrigin) -> str:
        """The run that a mixture names. Raises ``ConfigError`` for one that is wrong."""
        return origin.load(self._starter.catalog).run

    def origin(self, name: str) -> MixtureOrigin:
        """Where the mixture of a run stands, be it served or not. Raises ``NotFound``, ``Forbidden``."""
        _require_sight(name)
        return (self._runs.get(name) or self._problem_of(name) or self.get(name)).origin

    def _reload(
        self, served: ServedRun, mixture: RunConfig, reason: Reason | None
    ) -> tuple[ServedRun, str]:
        note = "The mixture is the one in force; what else the file says holds from now on."
        # What is wrong shows before anything ends.
        prepared, change = self._starter.prepare(
            mixture, served.origin, reason, self._resume_points_of
        )
        if change is not None:
            revision = served.mixture.revise(change)
            note = f"Revision {revision.number} holds from sample {revision.sample_index:,} on."
        del self._runs[served.name]
        why = ServerStopping(
            f"run {served.name!r} is being reloaded; it goes on where it was in a moment"
        )
        self._end([served], why)
        try:
            return self._begin(prepared), note
        except Exception as error:
            self._note(served.name, served.origin, error)
            raise

    def _begin(self, served: ServedRun, change: MixtureChange | None = None) -> ServedRun:
        """Leads a run, once its lease lapsed, and starts its threads."""
        if not self._starter.standby:
            served.leadership.wait_to_lead()
        with self._lock:
            if self._stopping:
                served.leadership.let_go()
                raise ServerStopping("the server is stopping; it serves no more runs")
            self._runs[served.name] = served
            served.coordinator.start()
            served.recorder.start()
        if change is not None:
            served.revision_handler.revise_soon(change)
        return served

    def _note(self, name: str, origin: MixtureOrigin, error: Exception) -> TokenloomError:
        problem = (
            error
            if isinstance(error, TokenloomError)
            else TokenloomError(f"{type(error).__name__}: {error}")
        )
        self._problems[origin.where] = RunProblem(name, origin, problem)
        return problem

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """Makes the caller the only one that changes a run. Raises ``RunBusy``, and ``Forbidden`` where its token is
        not good for the run."""
        _require_sight(name)
        with self._lock:
            if name in self._changing:
                raise RunBusy(
                    f"run {name!r} is being added, reloaded or removed just now; try again when that is done"
                )
            self._changing.add(name)
        try:
            yield
        except PermissionError as error:
            raise ConfigError(
                f"run {name!r}: {error.filename} cannot be used ({reason(error)})"
            ) from None
        finally:
            self._changing.discard(name)

    def _end(self, ending: Collection[ServedRun], why: TokenloomError | None = None) -> None:
        """Commits what is acknowledged and ends the runs' threads; bounded. ``why``: the runs alone end, and their
        streams with it; None: the server."""
        for served in ending:
            served.peeks.stop()
            served.evaluations.stop()
        _end_each(STOP_S, [partial(served.coordinator.stop, why=why) for served in ending])
        _end_each(RECORD_S, [served.recorder.end for served in ending])
        # After the last commits.
        _end_each(LET_GO_S, [served.leadership.end for served in ending])
        for served in ending:
            if why is not None:
                served.coordinator.sessions.await_detached(GOODBYE_S)
                for close in served.closers.copy():
                    close()
            served.coordinator.order.resources.close()

    def _tell(self) -> None:
        with self._lock:
            self._on_change()

    def _free(self) -> None:
        """Gives the memory of a run back that has ended: its parts know each other, so a search has to find them, also
        among what was there when the server was ready, which no search goes through otherwise."""
        was_frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if was_frozen:
            gc.freeze()

    def stop(self) -> None:
        """Commits what is acknowledged and ends every run's threads; bounded."""
        with self._lock:
            self._stopping = True
        self._end(self.served())

    # --- found ----------------------------------------------------------------------------------------

    def get(self, run: str) -> ServedRun:
        """Every way to a run goes through here. Raises ``Forbidden`` where the present caller's token is not good for
        it; ``NotFound``, naming the runs that are served; and, for a run that is to be served, what trainers wait at:
        ``NotLeader`` while it is being brought up, and an error that may pass by itself."""
        _require_sight(run)
        served = self._runs.get(run)
        if served is not None:
            return served
        if run in self._changing:
            raise NotLeader(f"run {run!r} is being added, reloaded or removed here; ask again")
        problem = self._problem_of(run)
        if problem is None:
            known = ", ".join(self.names()) or "none"
            raise NotFound(f"there is no run {run!r} on this server; it serves: {known}")
        kind = NotLeader if problem.error.grpc_status == "UNAVAILABLE" else NotFound
        raise kind(
            f"run {run!r} is not served: {problem.error.name}: {problem.error}\nmend that, and have it tried again: "
            f"tokenloom runs URL --reload {run}"
        )

    def _problem_of(self, run: str) -> RunProblem | None:
        return next((problem for problem in self.problems() if problem.run == run), None)

    def _resume_points_of(self, run: str) -> ResumePoints | None:
        served = self._runs.get(run) if caller.who.get().sees(run) else None
        return served.resume_points if served is not None else None

    def names(self) -> list[str]:
        """Of the runs that the present caller's token is good for."""
        return sorted(filter(caller.who.get().sees, self._runs))

    def served(self) -> list[ServedRun]:
        """All runs that are served, by name."""
        return [run for _, run in sorted(self._runs.copy().items())]

    def problems(self) -> list[RunProblem]:
        """The mixtures that are not served, or not as their files have them now."""
        problems = (
            problem
            for problem in self._problems.copy().values()
            if caller.who.get().sees(problem.run)
        )
        return sorted(problems, key=lambda problem: problem.run)

    def not_ready(self) -> str | None:
        """Why no run can be served now; None where one can. What keeps one run from it stands in that run's stats, and
        is no reason to send the ranks of the others away."""
        reasons = {run.name: run.coordinator.not_ready() for run in self.served()}
        if None in reasons.values():
            return None
        reasons |= {problem.run: str(problem.error) for problem in self._problems.copy().values()}
        return (
            "; ".join(f"run {name}: {reason}" for name, reason in reasons.items())
            or "no run is served yet"
        )

    def fork(
        self,
        run: str,
        *,
        parent: str | None = None,
        sample_index: int | None = None,
        text: str | None = None,
    ) -> NextLaunch:
        """Pins where a run that has not begun begins: where ``parent`` stood at a sample index (None: the committed
        one), or as the snapshot ``text`` of another run says. Raises ``ConfigError``, ``NotFound``, ``BeyondHorizon``.
        """
        served = self.get(run)
        served.coordinator.require_lead()
        if (parent is None) == (text is None):
            raise ConfigError(
                "a fork names the run that it begins from, or brings a snapshot of it: give one of them"
            )
        if parent is not None:
            text, _ = self.get(parent).snapshots.take(sample_index, save=False)
        elif sample_index is not None:
            raise ConfigError("a snapshot has its own sample index: leave sample_index out")
        assert text is not None
        return served.restores.fork(text)


def _require_sight(run: str) -> None:
    """Raises ``Forbidden`` where the present caller's token is not good for a run."""
    if not caller.who.get().sees(run):
        raise Forbidden(
            f"the token {caller.who.get().name!r} is not good for run {run!r}; use one that is"
        )


def _end_each(within_s: float, ends: Sequence[Callable[[float], None]]) -> None:
    """Calls functions that each wait so many seconds at most. All are asked to end first, so that they end side by
    side: the bound is one for all of them, and a ledger that hangs is waited for once."""
    for end in ends:
        end(0.0)
    deadline = time.monotonic() + within_s
    for end in ends:
        end(max(0.0, deadline - time.monotonic()))

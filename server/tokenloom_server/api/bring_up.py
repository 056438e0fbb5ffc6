"""How one run is brought up: recorded, or taken over."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tokenloom_server.api.mixture_origin import MixtureOrigin
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.catalog import open_catalog
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.order_fields import began_with, differences, refuse
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import as_file, parsed
from tokenloom_server.order.notes import label_notes
from tokenloom_server.order.origin import Origin
from tokenloom_server.order.revision import differences_of_files
from tokenloom_server.order.segments import measured_ahead
from tokenloom_server.order.timeline import Timeline
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

"""Changing a run while it trains: revisions are journalled before production passes them, and dropped before, too."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from tokenloom_proto.seal import canonical
from tokenloom_proto.threads import Background

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    LimitExceeded,
    NotFound,
    SnapshotInvalid,
    TokenloomError,
)
from tokenloom_server.ledger.commands import DropRevisions, Revise
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.order import revision_content, snapshot
from tokenloom_server.order.mixture_content import as_file, places
from tokenloom_server.order.segments import Origin
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.reports.stats import MixtureInfo, PhaseInfo, RevisionInfo
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.views import RunView

if TYPE_CHECKING:
    from tokenloom_server.config.mixture_change import MixtureChange

_log = logging.getLogger(__name__)

#: How many one run may have. Each is kept with a mixture of its own, and all are read when a server takes the run up.
MAX_REVISIONS = 1000


class RevisionHandler:
    """Makes and drops the revisions of one run. Thread-safe."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        self._coordinator = coordinator

    def revise(self, change: MixtureChange) -> StoredRevision:
        """Makes a change hold from a sample index on; returns once that is durable. One that is only tried is returned
        as it would be.

        Raises ``ConfigError``, ``SourceError``, ``BeyondHorizon`` for an index that may have been produced already,
        and the ledger's errors.
        """
        coordinator = self._coordinator
        if change.dry_run:
            return self.tried(change)[1].revisions[-1]
        with (
            coordinator.one_change,
            coordinator.changes.held(self._choice_of(change)) as (view, index),
        ):
            timeline, epoch = view.timeline, view.lease.epoch
            revision = self._made(change, view, index)
            closes = view.closed_by(index)
            coordinator.changes.write(
                epoch,
                timeline.with_revisions((*timeline.revisions, revision)),
                lambda known: self._write(epoch, revision, known, closes),
                replace(coordinator.stored(), closed_generation=closes) if closes else None,
            )
        _log.info(
            "%s: revision %d holds from sample %d on (%s): %s",
            coordinator.name, revision.number, index, revision.reason,
            "; ".join(json.loads(revision.content)["changes"]),
        )  # fmt: skip
        return revision

    def tried(self, change: MixtureChange) -> tuple[RunView, Timeline]:
        """The run as it is, and its timeline as a change would make it: with one revision more. Holds nothing up.
        Raises what ``revise`` does, but for what its write does."""
        self._coordinator.require_lead()
        choose, view = self._choice_of(change), self._coordinator.view()
        revision = self._made(change, view, choose(view))
        return view, view.timeline.with_revisions((*view.timeline.revisions, revision))

    def _made(self, change: MixtureChange, view: RunView, index: int) -> StoredRevision:
        """The revision that makes a change hold from a sample index on."""
        now, known_from = view.generation.number, view.generation.first_unproduced
        return StoredRevision(
            number=len(view.timeline.revisions) + 1,
            sample_index=index,
            made_at=self._coordinator.wall_clock(),
            author=change.author,
            reason=change.reason,
            content=canonical(
                revision_content.revise(view.timeline, change, index, now, known_from, view.state)
            ),
        )

    def revise_soon(self, change: MixtureChange) -> None:
        """``revise``, by a server that has just come up: at once where nobody trains, else after the liveness, when
        every rank that still trains has come to it. Until then nobody knows how far they are."""
        coordinator, generation = self._coordinator, self._coordinator.view().generation
        if generation.stands_still or generation.all_attached:
            self.revise(change)
            return
        wait_s = coordinator.timeouts.liveness_s
        _log.info(
            "%s: the revision is made in %g s: ranks of the last launch may come back",
            coordinator.name,
            wait_s,
        )
        Background(
            "revise", partial(self._revise_now, change), coordinator.name, after_s=wait_s
        ).start()

    def _revise_now(self, change: MixtureChange) -> None:
        """``revise``, where nobody waits for the answer but who reads the log."""
        try:
            self.revise(change)
        except TokenloomError as error:
            _log.error(
                "%s: the revision of the mixture file (%s) was not made: %s: %s; once that is mended, start the server "
                "again with --revise",
                self._coordinator.name, change.reason, error.name, error,
            )  # fmt: skip

    def drop(self, number: int) -> list[StoredRevision]:
        """Drops a revision and all after it, none of which production may have reached; returns them.

        Raises ``NotFound``, ``BeyondHorizon`` and the ledger's errors.
        """
        coordinator = self._coordinator
        with (
            coordinator.one_change,
            coordinator.changes.held(lambda view: _droppable(coordinator.name, number, view)) as (
                view,
                _,
            ),
        ):
            revisions, epoch = view.timeline.revisions, view.lease.epoch
            kept, dropped = revisions[: number - 1], revisions[number - 1 :]
            coordinator.changes.write(
                epoch,
                view.timeline.with_revisions(kept),
                lambda known: coordinator.ledger.execute(
                    DropRevisions(
                        coordinator.uid, coordinator.stream, epoch, number, known_changes=known
                    )
                ),
            )
        for revision in dropped:
            _log.info(
                "%s: revision %d, which was to hold from sample %d on (%s), is taken back",
                coordinator.name, revision.number, revision.sample_index, revision.reason,
            )  # fmt: skip
        return list(dropped)

    def _choice_of(self, change: MixtureChange) -> Callable[[RunView], int]:
        """What chooses the sample index of a change, under the run's lock: what the ledger has is read before that."""
        if change.sample_index is not None and change.total_tokens is not None:
            raise ConfigError(
                "sample_index and total_tokens are both given; name one of them, or neither"
            )
        kept = self.kept(self._coordinator.view())
        return lambda view: _index_of(
            self._coordinator.name, change, view, view.first_revisable(kept)
        )

    def kept(self, view: RunView) -> int | None:
        """Of a run that stands still, the sample index after all states that the ledger has as texts: a revision before
        that would have to be named in them. None where ranks train."""
        coordinator, generation = self._coordinator, view.generation
        if not generation.stands_still:
            return None
        stored = coordinator.stored()
        saved = [
            json.loads(one.text) for one in coordinator.ledger.snapshots(stored.uid, stored.stream)
        ]
        texts = [generation.start_index]
        texts += [one["sample_index"] for one in saved if one["generation"] == generation.number]
        return 1 + max(texts)

    def _write(
        self, epoch: int, revision: StoredRevision, known_changes: int, closes: int = 0
    ) -> int:
        coordinator = self._coordinator
        revise = Revise(
            coordinator.uid,
            coordinator.stream,
            epoch,
            revision,
            closes,
            known_changes=known_changes,
        )
        return coordinator.ledger.execute(revise)

    def take_over(self, text: str | bytes) -> None:
        """A ledger that is not as far as a snapshot of the run takes over the revisions that the snapshot carries; one
        that never opened it the origin of a fork, too (the caller holds ``one_change``, and nobody trains).

        So a run may move to an empty ledger, and goes on with one that lost data. What is no such snapshot, or
        has been decided otherwise here, is left to who reads it.
        """
        coordinator = self._coordinator
        brought, epoch = brings(coordinator.name, text), coordinator.lease.epoch
        stored = (
            coordinator.ledger.read_run(coordinator.name, coordinator.stream)
            if brought is not None
            else None
        )
        if brought is None or stored is None:
            return
        timeline = coordinator.timeline
        if stored.opening is None and timeline.origin is None and brought.origin is not None:
            timeline = timeline.with_origin(Origin(**brought.origin))
        # In the order of the samples, as a ledger takes them.
        missing = sorted(
            (one for one in brought.revisions if not timeline.holds(*one)), key=itemgetter(0)
        )
        if stored.opening is not None:
            # What was still to come when the state was saved, and is not here, may have been dropped since.
            for index, _ in missing:
                if index > brought.sample_index:
                    _log.warning(
                        "%s: when the state at sample %d was saved, a revision was to hold from sample %d on, and this "
                        "ledger has none there: it was dropped since, or lost; make it again if it is wanted",
                        coordinator.name, brought.sample_index, index,
                    )  # fmt: skip
            missing = [
                (index, content) for index, content in missing if index <= brought.sample_index
            ]
        after = timeline.last_revised
        if stored.opening is not None and stored.committed is not None:
            after = max(after, stored.committed.sample_index)
        if (timeline is coordinator.timeline and not missing) or any(
            index < after for index, _ in missing
        ):
            return
        revisions = [
            StoredRevision(
                number=number,
                sample_index=index,
                made_at=coordinator.wall_clock(),
                author="",
                reason="brought by a trainer's state",
                content=canonical({**content, "generation": brought.generation}),
            )
            for number, (index, content) in enumerate(missing, start=len(timeline.revisions) + 1)
        ]
        timeline = timeline.with_revisions((*timeline.revisions, *revisions))
        # Before anything is written: that the state is one of this run under them.
        snapshot.parse(text, coordinator.template(), timeline.shape_at, coordinator.order.config)

        def write(known: int) -> int:
            for revision in revisions:
                known = self._write(epoch, revision, known)
            return known

        coordinator.changes.write(epoch, timeline, write)
        for revision in revisions:
            _log.info(
                "%s: revision %d, from sample %d on, came with a trainer's state",
                coordinator.name, revision.number, revision.sample_index,
            )  # fmt: skip


class Mixture:
    """The mixture of one run."""

    def __init__(self, coordinator: RunCoordinator, revising: RevisionHandler) -> None:
        self._coordinator = coordinator
        self._revising = revising

    def info(self) -> MixtureInfo:
        """The mixture at what is committed, and all that changes it."""
        view = self._coordinator.view()
        timeline, index = view.timeline, view.commit.sample_index
        config = timeline.at(index).config
        return MixtureInfo(
            run=self._coordinator.name,
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
                    sequence_length=segment.config.sequence_length,
                )
                for segment in timeline.segments
                if segment.phase is not None
            ],
            revisions=[revision_info(timeline, revision, index) for revision in timeline.revisions],
            first_revisable=view.first_revisable(self._revising.kept(view)),
        )

    def revise(self, change: MixtureChange) -> RevisionInfo:
        """Changes the mixture from a sample index on; returns once that is durable.

        Raises what ``RevisionHandler.revise`` raises."""
        revision = self._revising.revise(change)
        view = self._coordinator.view()
        info = revision_info(view.timeline, revision, view.commit.sample_index)
        return info.model_copy(update={"eta_s": view.seconds_until(revision.sample_index)})

    def drop(self, number: int) -> list[RevisionInfo]:
        """Takes a revision and all after it back, oldest first. Raises ``BeyondHorizon`` where one may have been
        produced already, ``NotFound``."""
        timeline = self._coordinator.timeline
        return [revision_info(timeline, revision, 0) for revision in self._revising.drop(number)]


def revision_info(timeline: Timeline, revision: StoredRevision, committed: int) -> RevisionInfo:
    """A revision for people; ``committed`` is how far the run has come."""
    return RevisionInfo.of(
        revision,
        total_tokens=timeline.tokens_at(revision.sample_index),
        changes=json.loads(revision.content)["changes"],
        in_force=revision.sample_index <= committed,
    )


def _index_of(run: str, change: MixtureChange, view: RunView, least: int) -> int:
    """The sample index from which on a change is to hold. Raises ``LimitExceeded``, ``ConfigError`` and
    ``BeyondHorizon``."""
    timeline, end = view.timeline, view.generation.end
    if len(timeline.revisions) >= MAX_REVISIONS and not change.dry_run:
        raise LimitExceeded(
            f"run {run!r} has {len(timeline.revisions)} revisions, and a run may have {MAX_REVISIONS}: "
            "put several changes into one, or plan them (a schedule, or phases) in a run forked from here"
        )
    last = max(timeline.revisions, key=lambda revision: revision.sample_index, default=None)
    wished = change.sample_index
    if change.total_tokens is not None:
        wished = timeline.index_at(change.total_tokens)
    if wished is not None and last is not None and wished < last.sample_index:
        raise ConfigError(
            f"revision {last.number} holds from sample {last.sample_index} on, and one at sample {wished} "
            "would come before it: choose a later sample, or drop that one first"
        )
    # A phase with another sequence length ends what a generation produces, but not the data.
    if end is not None and not any(segment.begin == end.end_index for segment in timeline.segments):
        raise BeyondHorizon(
            f"the data of run {run!r} end at sample {end.end_index} ({end.reason}), and no sample after that can be "
            "under a revision: restore to a sample before it, or fork a new run from there"
        )
    if wished is None:
        return least
    if wished < least:
        raise BeyondHorizon(
            f"sample {wished} may have been produced already: a revision of run {run!r} can hold from sample {least} "
            f"on ({timeline.tokens_at(least):,} tokens)"
        )
    return wished


def _droppable(run: str, number: int, view: RunView) -> int:
    """The sample index from which on a revision holds. Raises ``NotFound``, and ``BeyondHorizon`` where it cannot be
    dropped any more."""
    revisions, least = view.timeline.revisions, view.generation.first_unproduced
    if not 1 <= number <= len(revisions):
        raise NotFound(f"run {run!r} has {len(revisions)} revisions, and none of number {number}")
    # Skips may lie before revisions that were made earlier.
    first = min(revisions[number - 1 :], key=lambda revision: revision.sample_index)
    index = first.sample_index
    if index < least:
        raise BeyondHorizon(
            f"revision {first.number} holds from sample {index} on, and samples before {least} may have been produced "
            f"already: undo it by another revision of run {run!r}, or restore to a sample before it first, by more "
            "than the window and a state boundary"
        )
    return index


def brings(run: str, text: str | bytes) -> snapshot.ForeignSnapshot | None:
    """A snapshot of the run that says more than its mixture file does; None for any other text."""
    try:
        foreign = snapshot.read_foreign(text)
    except SnapshotInvalid:
        return None
    says_more = foreign is not None and foreign.run == run and (foreign.revisions or foreign.origin)
    return foreign if says_more else None

"""Changing a run while it trains: revisions are journalled before production passes them, and dropped before, too."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenloom_proto.seal import canonical

from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    LedgerUnavailable,
    LimitExceeded,
    NotFound,
    SnapshotInvalid,
)
from tokenloom_server.ledger.base import StoredRevision
from tokenloom_server.order import snapshot
from tokenloom_server.order.timeline import Origin, Timeline
from tokenloom_server.run.coordinator import RunCoordinator

_log = logging.getLogger(__name__)

#: Of one run. Each is kept with a mixture of its own, and all are read when a server takes the run up.
MAX_REVISIONS = 1000


class Revising:
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
        if change.sample_index is not None and change.total_tokens is not None:
            raise ConfigError("sample_index and total_tokens are both given; name one of them, or neither")
        with coordinator.one_change:
            with coordinator.lock:
                coordinator.require_lead()
                timeline, epoch = coordinator.timeline, coordinator.epoch
                if len(timeline.revisions) >= MAX_REVISIONS and not change.dry_run:
                    raise LimitExceeded(
                        f"run {coordinator.name!r} has {len(timeline.revisions)} revisions, and a run may have "
                        f"{MAX_REVISIONS}: "
                        "put several changes into one, or plan them (a schedule, or phases) in a run forked from here"
                    )
                index = self._index(timeline, change)
                generation = coordinator.active.generation.number if coordinator.active is not None else 0
                if not change.dry_run:
                    # Production waits there from now on.
                    coordinator.revising_at = index
            try:
                content = timeline.revise(change, index, generation)
            except BaseException:
                coordinator.revise(epoch)
                raise
            revision = StoredRevision(
                number=len(timeline.revisions) + 1,
                sample_index=index,
                made_at=coordinator.wall_clock(),
                author=change.author,
                reason=change.reason,
                content=canonical(content),
            )
            if change.dry_run:
                return revision
            self._write(
                lambda: coordinator.ledger.revise(coordinator.uid, coordinator.stream, epoch, revision),
                epoch,
                timeline,
                (*timeline.revisions, revision),
            )
        _log.info(
            "%s: revision %d holds from sample %d on (%s): %s",
            coordinator.name, revision.number, index, revision.reason, "; ".join(content["changes"]),
        )  # fmt: skip
        return revision

    def drop(self, number: int) -> list[StoredRevision]:
        """Drops a revision and all after it, none of which production may have reached; returns them.

        Raises ``NotFound``, ``BeyondHorizon`` and the ledger's errors.
        """
        coordinator = self._coordinator
        with coordinator.one_change:
            with coordinator.lock:
                coordinator.require_lead()
                timeline, epoch = coordinator.timeline, coordinator.epoch
                if not 1 <= number <= len(timeline.revisions):
                    raise NotFound(
                        f"run {coordinator.name!r} has {len(timeline.revisions)} revisions, and none of number {number}"
                    )
                dropped = timeline.revisions[number - 1 :]
                least = coordinator.first_unproduced()
                if dropped[0].sample_index < least:
                    raise BeyondHorizon(
                        f"revision {number} holds from sample {dropped[0].sample_index} on, and samples before {least} "
                        f"may have been produced already: undo it by another revision of run {coordinator.name!r}, "
                        f"or restore "
                        "to a sample before it first, by more than the window and a state boundary"
                    )
                coordinator.revising_at = dropped[0].sample_index
            self._write(
                lambda: coordinator.ledger.drop_revisions(coordinator.uid, coordinator.stream, epoch, number),
                epoch,
                timeline,
                timeline.revisions[: number - 1],
            )
        for revision in dropped:
            _log.info(
                "%s: revision %d, which was to hold from sample %d on (%s), is taken back",
                coordinator.name, revision.number, revision.sample_index, revision.reason,
            )  # fmt: skip
        return list(dropped)

    def _write(
        self, write: Callable[[], None], epoch: int, timeline: Timeline, revisions: tuple[StoredRevision, ...]
    ) -> None:
        """Writes, and puts in force what was written; production waits meanwhile."""
        coordinator = self._coordinator
        try:
            revised = timeline.with_revisions(revisions)
            write()
        except LedgerUnavailable as error:
            with coordinator.lock:
                if coordinator.epoch == epoch:
                    coordinator.await_ledger("a revision was written", error)
            raise
        except BaseException:
            coordinator.revise(epoch)
            raise
        coordinator.revise(epoch, revised)

    def adopt(self, text: str | bytes) -> None:
        """``take_over`` for a ledger that never opened the run, by who does not hold ``one_change``."""
        coordinator = self._coordinator
        if brings(coordinator.name, text) is None:
            return
        with coordinator.one_change:
            stored = coordinator.ledger.read_run(coordinator.name, coordinator.stream)
            if stored is not None and stored.opening is None:
                self.take_over(text)

    def take_over(self, text: str | bytes) -> None:
        """A ledger that is not as far as a snapshot of the run takes over the revisions that the snapshot carries; one
        that never opened it the origin of a fork, too (the caller holds ``one_change``, and nobody trains).

        So a run may move to an empty ledger, and goes on with one that lost what it had. What is no such snapshot, or
        has been decided otherwise here, is left to who reads it.
        """
        coordinator = self._coordinator
        found = brings(coordinator.name, text)
        stored = coordinator.ledger.read_run(coordinator.name, coordinator.stream) if found is not None else None
        if found is None or stored is None:
            return
        timeline, epoch = coordinator.timeline, coordinator.epoch
        if stored.opening is None and timeline.origin is None and found.origin is not None:
            timeline = timeline.with_origin(Origin(**found.origin))
        missing = [(index, content) for index, content in found.revisions if not timeline.holds(index, content)]
        if stored.opening is not None:
            # What was still to come when the state was saved, and is not here, may have been dropped since.
            for index, _ in missing:
                if index > found.sample_index:
                    _log.warning(
                        "%s: when the state at sample %d was saved, a revision was to hold from sample %d on, and this "
                        "ledger has none there: it was dropped since, or lost; make it again if it is wanted",
                        coordinator.name, found.sample_index, index,
                    )  # fmt: skip
            missing = [(index, content) for index, content in missing if index <= found.sample_index]
        behind = timeline.revisions[-1].sample_index if timeline.revisions else 0
        if stored.opening is not None and stored.committed is not None:
            behind = max(behind, stored.committed.sample_index)
        if (timeline is coordinator.timeline and not missing) or any(index < behind for index, _ in missing):
            return
        revisions = [
            StoredRevision(
                number=number,
                sample_index=index,
                made_at=coordinator.wall_clock(),
                author="",
                reason="brought by a trainer's state",
                content=canonical({**content, "generation": found.generation}),
            )
            for number, (index, content) in enumerate(missing, start=len(timeline.revisions) + 1)
        ]
        timeline = timeline.with_revisions((*timeline.revisions, *revisions))
        # Before anything is written: that the state is one of this run under them.
        snapshot.parse(text, coordinator.order.template("", coordinator.stream, 0), timeline.shape_at)
        try:
            for revision in revisions:
                coordinator.ledger.revise(coordinator.uid, coordinator.stream, epoch, revision)
        except LedgerUnavailable as error:
            with coordinator.lock:
                if coordinator.epoch == epoch:
                    coordinator.await_ledger("a revision was written", error)
            raise
        coordinator.revise(epoch, timeline)
        for revision in revisions:
            _log.info(
                "%s: revision %d, from sample %d on, came with a trainer's state",
                coordinator.name, revision.number, revision.sample_index,
            )  # fmt: skip

    def _index(self, timeline: Timeline, change: MixtureChange) -> int:
        """The sample index from which on a change is to hold (the caller holds the lock)."""
        coordinator = self._coordinator
        newest = timeline.revisions[-1] if timeline.revisions else None
        wished = change.sample_index
        if change.total_tokens is not None:
            wished = timeline.index_at(change.total_tokens)
        if wished is not None and newest is not None and wished < newest.sample_index:
            raise ConfigError(
                f"revision {newest.number} holds from sample {newest.sample_index} on, and one at sample {wished} "
                "would come before it: choose a later sample, or drop that one first"
            )
        end = coordinator.active.generation.end if coordinator.active is not None else None
        # A phase with another sequence length ends what a generation produces, but not the data.
        if end is not None and not any(segment.begin == end.end_index for segment in timeline.segments):
            raise BeyondHorizon(
                f"the data of run {coordinator.name!r} end at sample {end.end_index} ({end.reason}), and no sample "
                f"behind "
                "that can be under a revision: restore to a sample before it, or fork a new run from there"
            )
        least = coordinator.first_revisable()
        if wished is None:
            return least
        if wished < least:
            raise BeyondHorizon(
                f"sample {wished} may have been produced already: a revision of run {coordinator.name!r} can hold from "
                f"sample {least} on"
            )
        return wished


def brings(run: str, text: str | bytes) -> snapshot.Foreign | None:
    """A snapshot of the run that says more than its mixture file does; None for any other text."""
    try:
        found = snapshot.foreign(text)
    except SnapshotInvalid:
        return None
    return found if found is not None and found.run == run and (found.revisions or found.origin) else None

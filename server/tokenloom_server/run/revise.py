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
from tokenloom_server.order.timeline import Course, Origin
from tokenloom_server.run.coordinator import Host

_log = logging.getLogger(__name__)

#: Of one run. Each is kept with a mixture of its own, and all are read when a server takes the run up.
MAX_REVISIONS = 1000


class Revising:
    """Makes and drops the revisions of one run. Thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def revise(self, change: MixtureChange) -> StoredRevision:
        """Makes a change hold from a sample index on; returns once that is durable. One that is only tried is returned
        as it would be.

        Raises ``ConfigError``, ``SourceError``, ``BeyondHorizon`` for an index that may have been produced already,
        and the ledger's errors.
        """
        host = self._host
        if change.sample_index is not None and change.total_tokens is not None:
            raise ConfigError("sample_index and total_tokens are both given; name one of them, or neither")
        with host.one_change:
            with host.lock:
                host.require_lead()
                course, epoch = host.course, host.epoch
                if len(course.revisions) >= MAX_REVISIONS and not change.dry_run:
                    raise LimitExceeded(
                        f"run {host.name!r} has {len(course.revisions)} revisions, and a run may have {MAX_REVISIONS}: "
                        "put several changes into one, or plan them (a schedule, or phases) in a run forked from here"
                    )
                index = self._index(course, change)
                generation = host.live.generation.number if host.live is not None else 0
                if not change.dry_run:
                    # Production waits there from now on.
                    host.revising_at = index
            try:
                content = course.revise(change, index, generation)
            except BaseException:
                host.revise(epoch)
                raise
            revision = StoredRevision(
                number=len(course.revisions) + 1,
                sample_index=index,
                made_at=host.wall_clock(),
                author=change.author,
                reason=change.reason,
                content=canonical(content),
            )
            if change.dry_run:
                return revision
            self._write(
                lambda: host.ledger.revise(host.uid, host.stream, epoch, revision),
                epoch,
                course,
                (*course.revisions, revision),
            )
        _log.info(
            "%s: revision %d holds from sample %d on (%s): %s",
            host.name, revision.number, index, revision.reason, "; ".join(content["changes"]),
        )  # fmt: skip
        return revision

    def drop(self, number: int) -> list[StoredRevision]:
        """Drops a revision and all after it, none of which production may have reached; returns them.

        Raises ``NotFound``, ``BeyondHorizon`` and the ledger's errors.
        """
        host = self._host
        with host.one_change:
            with host.lock:
                host.require_lead()
                course, epoch = host.course, host.epoch
                if not 1 <= number <= len(course.revisions):
                    raise NotFound(
                        f"run {host.name!r} has {len(course.revisions)} revisions, and none of number {number}"
                    )
                dropped = course.revisions[number - 1 :]
                least = host.first_unproduced()
                if dropped[0].sample_index < least:
                    raise BeyondHorizon(
                        f"revision {number} holds from sample {dropped[0].sample_index} on, and samples before {least} "
                        f"may have been produced already: undo it by another revision of run {host.name!r}, or restore "
                        "to a sample before it first, by more than the window and a state boundary"
                    )
                host.revising_at = dropped[0].sample_index
            self._write(
                lambda: host.ledger.drop_revisions(host.uid, host.stream, epoch, number),
                epoch,
                course,
                course.revisions[: number - 1],
            )
        for revision in dropped:
            _log.info(
                "%s: revision %d, which was to hold from sample %d on (%s), is taken back",
                host.name, revision.number, revision.sample_index, revision.reason,
            )  # fmt: skip
        return list(dropped)

    def _write(
        self, write: Callable[[], None], epoch: int, course: Course, revisions: tuple[StoredRevision, ...]
    ) -> None:
        """Writes, and puts in force what was written; production waits meanwhile."""
        host = self._host
        try:
            revised = course.with_revisions(revisions)
            write()
        except LedgerUnavailable as error:
            with host.lock:
                if host.epoch == epoch:
                    host.doubt("a revision was written", error)
            raise
        except BaseException:
            host.revise(epoch)
            raise
        host.revise(epoch, revised)

    def adopt(self, text: str | bytes) -> None:
        """``take_over`` for a ledger that never opened the run, by who does not hold ``one_change``."""
        host = self._host
        if brings(host.name, text) is None:
            return
        with host.one_change:
            stored = host.ledger.read_run(host.name, host.stream)
            if stored is not None and stored.opening is None:
                self.take_over(text)

    def take_over(self, text: str | bytes) -> None:
        """A ledger that is not as far as a snapshot of the run takes over the revisions that the snapshot carries; one
        that never opened it the origin of a fork, too (the caller holds ``one_change``, and nobody trains).

        So a run may move to an empty ledger, and goes on with one that lost what it had. What is no such snapshot, or
        has been decided otherwise here, is left to who reads it.
        """
        host = self._host
        found = brings(host.name, text)
        stored = host.ledger.read_run(host.name, host.stream) if found is not None else None
        if found is None or stored is None:
            return
        course, epoch = host.course, host.epoch
        if stored.opening is None and course.origin is None and found.origin is not None:
            course = course.with_origin(Origin(**found.origin))
        missing = [(index, content) for index, content in found.revisions if not course.holds(index, content)]
        if stored.opening is not None:
            # What was still to come when the state was saved, and is not here, may have been dropped since.
            for index, _ in missing:
                if index > found.sample_index:
                    _log.warning(
                        "%s: when the state at sample %d was saved, a revision was to hold from sample %d on, and this "
                        "ledger has none there: it was dropped since, or lost; make it again if it is wanted",
                        host.name, found.sample_index, index,
                    )  # fmt: skip
            missing = [(index, content) for index, content in missing if index <= found.sample_index]
        behind = course.revisions[-1].sample_index if course.revisions else 0
        if stored.opening is not None and stored.committed is not None:
            behind = max(behind, stored.committed.sample_index)
        if (course is host.course and not missing) or any(index < behind for index, _ in missing):
            return
        revisions = [
            StoredRevision(
                number=number,
                sample_index=index,
                made_at=host.wall_clock(),
                author="",
                reason="brought by a trainer's state",
                content=canonical({**content, "generation": found.generation}),
            )
            for number, (index, content) in enumerate(missing, start=len(course.revisions) + 1)
        ]
        course = course.with_revisions((*course.revisions, *revisions))
        # Before anything is written: that the state is one of this run under them.
        snapshot.parse(text, host.order.template("", host.stream, 0), course.shape_at)
        try:
            for revision in revisions:
                host.ledger.revise(host.uid, host.stream, epoch, revision)
        except LedgerUnavailable as error:
            with host.lock:
                if host.epoch == epoch:
                    host.doubt("a revision was written", error)
            raise
        host.revise(epoch, course)
        for revision in revisions:
            _log.info(
                "%s: revision %d, from sample %d on, came with a trainer's state",
                host.name, revision.number, revision.sample_index,
            )  # fmt: skip

    def _index(self, course: Course, change: MixtureChange) -> int:
        """The sample index from which on a change is to hold (the caller holds the lock)."""
        host = self._host
        newest = course.revisions[-1] if course.revisions else None
        wished = change.sample_index
        if change.total_tokens is not None:
            wished = course.index_at(change.total_tokens)
        if wished is not None and newest is not None and wished < newest.sample_index:
            raise ConfigError(
                f"revision {newest.number} holds from sample {newest.sample_index} on, and one at sample {wished} "
                "would come before it: choose a later sample, or drop that one first"
            )
        end = host.live.generation.end if host.live is not None else None
        # A phase with another sequence length ends what a generation produces, but not the data.
        if end is not None and not any(stretch.begin == end.end_index for stretch in course.stretches):
            raise BeyondHorizon(
                f"the data of run {host.name!r} end at sample {end.end_index} ({end.reason}), and no sample behind "
                "that can be under a revision: restore to a sample before it, or fork a new run from there"
            )
        least = host.first_revisable()
        if wished is None:
            return least
        if wished < least:
            raise BeyondHorizon(
                f"sample {wished} may have been produced already: a revision of run {host.name!r} can hold from "
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

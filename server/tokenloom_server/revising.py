"""Changing a run while it trains: revisions are journalled before production passes them, and dropped before, too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tokenloom_proto.seal import canonical

from tokenloom_server.errors import BeyondHorizon, ConfigError, LedgerUnavailable, NotFound
from tokenloom_server.host import Host
from tokenloom_server.ledger.base import StoredRevision
from tokenloom_server.mixture_change import MixtureChange

_log = logging.getLogger(__name__)


class Revising:
    """Makes and drops the revisions of one run. Thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # One at a time: each builds on the one before.
        self._one = threading.Lock()

    def revise(self, change: MixtureChange) -> StoredRevision:
        """Makes a change hold from a sample index on; returns once that is durable.

        Raises ``ConfigError``, ``SourceError``, ``BeyondHorizon`` for an index that may have been produced already,
        and the ledger's errors.
        """
        host = self._host
        with self._one:
            host.require_lead()
            course = host.course
            if change.sample_index is not None and change.total_tokens is not None:
                raise ConfigError("sample_index and total_tokens are both given; name one of them, or neither")
            wished = change.sample_index
            if change.total_tokens is not None:
                wished = course.index_at(change.total_tokens)
            index = self._hold(wished, course.revisions[-1] if course.revisions else None)
            generation = host.live.generation.number if host.live is not None else 0
            try:
                content = course.revise(change, index, generation)
            except BaseException:
                host.revise(course)
                raise
            revision = StoredRevision(
                number=len(course.revisions) + 1,
                sample_index=index,
                made_at=host.wall_clock(),
                author=change.author,
                reason=change.reason,
                content=canonical(content),
            )
            self._write(
                lambda: host.ledger.revise(host.uid, host.stream, host.epoch, revision),
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
        with self._one:
            host.require_lead()
            course = host.course
            if not 1 <= number <= len(course.revisions):
                raise NotFound(f"run {host.name!r} has {len(course.revisions)} revisions, and none of number {number}")
            dropped = course.revisions[number - 1 :]
            with host.lock:
                self._refuse_produced(dropped[0].sample_index, host.first_revisable())
                host.revising_at = dropped[0].sample_index
            self._write(
                lambda: host.ledger.drop_revisions(host.uid, host.stream, host.epoch, number),
                course.revisions[: number - 1],
            )
        _log.info("%s: revisions %d to %d are dropped", host.name, number, dropped[-1].number)
        return list(dropped)

    def _write(self, write: Callable[[], None], revisions: tuple[StoredRevision, ...]) -> None:
        """Writes, and puts in force what was written; production waits meanwhile."""
        host = self._host
        try:
            course = host.course.with_revisions(revisions)
            write()
        except LedgerUnavailable as error:
            with host.lock:
                host.doubt(error)
            raise
        except BaseException:
            host.revise(host.course)
            raise
        host.revise(course)

    def _hold(self, wished: int | None, newest: StoredRevision | None) -> int:
        """The sample index from which on a revision is to hold; production waits there from now on."""
        host = self._host
        if wished is not None and newest is not None and wished < newest.sample_index:
            raise ConfigError(
                f"revision {newest.number} holds from sample {newest.sample_index} on, and one at sample {wished} "
                "would come before it: choose a later sample, or drop that one first"
            )
        with host.lock:
            least = host.first_revisable()
            index = max(least, newest.sample_index if newest is not None else 0) if wished is None else wished
            self._refuse_produced(index, least)
            host.revising_at = index
        return index

    def _refuse_produced(self, index: int, least: int) -> None:
        if index < least:
            raise BeyondHorizon(
                f"sample {index} may have been produced already: a revision of run {self._host.name!r} can hold from "
                f"sample {least} on"
            )

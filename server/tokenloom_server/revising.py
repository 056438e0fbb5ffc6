"""Changing a run while it trains: revisions are journalled before production passes them, and dropped before, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenloom_proto.seal import canonical

from tokenloom_server.course import Course
from tokenloom_server.errors import BeyondHorizon, ConfigError, LedgerUnavailable, NotFound
from tokenloom_server.host import Host
from tokenloom_server.ledger.base import StoredRevision
from tokenloom_server.mixture_change import MixtureChange

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """A change under way. ``course`` is the one before until the body gives the one behind it."""

    course: Course
    index: int
    uid: str
    epoch: int
    generation: int


class Revising:
    """Makes and drops the revisions of one run. Thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def revise(self, change: MixtureChange) -> StoredRevision:
        """Makes a change hold from a sample index on; returns once that is durable.

        Raises ``ConfigError``, ``SourceError``, ``BeyondHorizon`` for an index that may have been produced already,
        and the ledger's errors.
        """
        host = self._host
        if change.sample_index is not None and change.total_tokens is not None:
            raise ConfigError("sample_index and total_tokens are both given; name one of them, or neither")
        with host.turning, self._held(lambda course: self._index(change, course)) as held:
            course = held.course
            content = course.revise(change, held.index, held.generation)
            revision = StoredRevision(
                number=len(course.revisions) + 1,
                sample_index=held.index,
                made_at=host.wall_clock(),
                author=change.author,
                reason=change.reason,
                content=canonical(content),
            )
            held.course = course.with_revisions((*course.revisions, revision))
            host.ledger.revise(held.uid, host.stream, held.epoch, revision)
        _log.info(
            "%s: revision %d holds from sample %d on (%s): %s",
            host.name, revision.number, held.index, revision.reason, "; ".join(content["changes"]),
        )  # fmt: skip
        return revision

    def drop(self, number: int) -> list[StoredRevision]:
        """Drops a revision and all after it, none of which production may have reached; returns them.

        Raises ``NotFound``, ``BeyondHorizon`` and the ledger's errors.
        """
        host = self._host

        def index(course: Course) -> int:
            if not 1 <= number <= len(course.revisions):
                raise NotFound(f"run {host.name!r} has {len(course.revisions)} revisions, and none of number {number}")
            found = course.revisions[number - 1].sample_index
            self._refuse_produced(found)
            return found

        with host.turning, self._held(index) as held:
            dropped = held.course.revisions[number - 1 :]
            held.course = held.course.with_revisions(held.course.revisions[: number - 1])
            host.ledger.drop_revisions(held.uid, host.stream, held.epoch, number)
        _log.info("%s: revisions %d to %d are dropped", host.name, number, dropped[-1].number)
        return list(dropped)

    @contextmanager
    def _held(self, index: Callable[[Course], int]) -> Iterator[_Held]:
        """Production waits before the sample index; behind it ``course`` is in force, unless the body fails.

        Everything is of one server epoch: where another began meanwhile, its leader has read what the ledger has.
        """
        host = self._host
        with host.lock:
            host.require_lead()
            live = host.live
            generation = live.generation.number if live is not None else 0
            held = _Held(host.course, index(host.course), host.uid, host.epoch, generation)
            host.revising_at = held.index
        before = held.course
        try:
            yield held
        except LedgerUnavailable as error:
            with host.lock:
                if host.epoch == held.epoch:
                    host.doubt(error)
            raise
        except BaseException:
            host.revise(before, held.epoch)
            raise
        host.revise(held.course, held.epoch)

    def _index(self, change: MixtureChange, course: Course) -> int:
        """The sample index from which on a change is to hold (the caller holds the host's lock)."""
        newest = course.revisions[-1] if course.revisions else None
        wished = change.sample_index
        if change.total_tokens is not None:
            wished = course.index_at(change.total_tokens)
        if wished is None:
            return max(self._host.first_revisable(), newest.sample_index if newest is not None else 0)
        if newest is not None and wished < newest.sample_index:
            raise ConfigError(
                f"revision {newest.number} holds from sample {newest.sample_index} on, and one at sample {wished} "
                "would come before it: choose a later sample, or drop that one first"
            )
        self._refuse_produced(wished)
        return wished

    def _refuse_produced(self, index: int) -> None:
        least = self._host.first_revisable()
        if index < least:
            raise BeyondHorizon(
                f"sample {index} may have been produced already: a revision of run {self._host.name!r} can hold from "
                f"sample {least} on"
            )

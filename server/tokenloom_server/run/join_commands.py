"""Commands of Joins: which ranks of an attempt were refused, and what the others wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from tokenloom_server.errors import JoinRefused, ServerStopping, SnapshotInvalid, TokenloomError
from tokenloom_server.order.replay import Replay
from tokenloom_server.run.join_call import MAX_NAME, RankRefusal, ResumeChoice
from tokenloom_server.run.stream_commands import StreamCommands

_log = logging.getLogger(__name__)

#: How often it is said how far the way to a far sample is, seconds.
REPORT_EVERY_S = 5.0
#: Refused attempts that are remembered, so that waiting ranks hear why.
_REMEMBERED_REFUSALS = 64
#: What is remembered of a refusal, characters; a request may make it say much.
_MAX_TEXT = 4000


class JoinCommands(StreamCommands):
    """A part of ``RunCoordinator``."""

    @contextmanager
    def opening(self, attempt: str) -> Iterator[None]:
        """While rank 0 of an attempt opens it: going forward to where it begins may take a while, and stats say so."""
        with self._lock:
            self._openings.add(attempt)
        try:
            yield
        finally:
            with self._lock:
                self._openings.discard(attempt)

    @contextmanager
    def going(self, replay: Replay, index: int) -> Iterator[Callable[[], None]]:
        """What is to be called before each turn of a replay to a sample index. Where that takes several turns it says
        at once, and every few seconds, how far it is and when it will be there: in the log and in the stats."""
        start, began = replay.sample_index, self.clock()
        report_at = began if replay.takes_turns(index) else float("inf")

        def report() -> None:
            nonlocal report_at
            now, made = self.clock(), replay.sample_index - start
            if now < report_at:
                return
            report_at = now + REPORT_EVERY_S
            left_s = (index - start - made) * (now - began) / made if made else 0.0
            pace = f", {made / (now - began):.0f} samples/s, {timedelta(seconds=round(left_s))} to go" if made else ""
            self.going_forward = f"from sample {start} to {index}: at sample {start + made}{pace}"
            _log.info("%s: going forward %s", self.name, self.going_forward)

        try:
            yield report
        finally:
            self.going_forward = ""

    def refuse_rank(self, attempt: str, rank: int, error: JoinRefused | SnapshotInvalid) -> None:
        """A rank was refused for good, so that its launch cannot train: the other ranks hear that now, whether they
        wait, train or are still to join. A rank that has its place already is another process's, and trains on."""
        refusal = type(error)(
            f"rank {rank} of attempt {attempt!r} was refused, so its launch cannot begin: {error}"[:_MAX_TEXT]
        )
        with self._lock:
            if self._active is not None and self._is_open(attempt):
                slots = self._active.generation.slots
                if self._error is None and rank < len(slots) and slots[rank].is_free:
                    self._stop_for_all(refusal)
                return
            if len(attempt) <= MAX_NAME:
                self._refused_ranks.setdefault(attempt, RankRefusal(refusal, {rank}))
            while len(self._refused_ranks) > _REMEMBERED_REFUSALS:
                self._refused_ranks.pop(next(iter(self._refused_ranks)))
            self._wakes.changed.notify_all()

    def require_own_slot(self, attempt: str, rank: int, nonce: str) -> None:
        """Raises ``AttemptUsed`` where another process has the slot, whatever that one asked for."""
        with self._lock:
            if self._active is not None and self._is_open(attempt):
                self._active.generation.require_own_slot(rank, nonce)

    def require_unrefused(self, attempt: str, rank: int) -> None:
        """Raises what another rank of the attempt was refused with."""
        with self._lock:
            self._require_unrefused(attempt, rank)

    def _require_unrefused(self, attempt: str, rank: int) -> None:
        refusal = self._refused_ranks.get(attempt)
        if refusal is not None and rank in refusal.heard_by:
            del self._refused_ranks[attempt]
        elif refusal is not None:
            refusal.heard_by.add(rank)
            raise type(refusal.error)(str(refusal.error))  # one that is kept must not keep the calls that raised it

    def refuse_attempt(self, attempt: str, choice: ResumeChoice, error: TokenloomError) -> None:
        """Rank 0 of an attempt was refused: the other ranks hear the same."""
        error.of_launch = True
        with self._lock:
            self._refused[attempt, choice] = error
            while len(self._refused) > _REMEMBERED_REFUSALS:
                self._refused.pop(next(iter(self._refused)))
            self._wakes.changed.notify_all()

    def has_opened(self, attempt: str, choice: ResumeChoice) -> bool:
        """Whether rank 0 of an attempt opened the present generation. Raises ``ServerStopping``, and what rank 0 was
        refused with."""
        with self._lock:
            if self.stopping:
                raise ServerStopping("the server is stopping; join again when it is back")
            refusal = self._refused.get((attempt, choice))
            if not self._is_open(attempt) and refusal is not None:
                raise refusal
            return self._is_open(attempt)

    def await_rank_0(self, attempt: str, choice: ResumeChoice, timeout_s: float) -> None:
        """Waits, bounded, until rank 0 opened the attempt, was refused, or cannot."""

        def is_decided() -> bool:
            is_refused = (attempt, choice) in self._refused or attempt in self._refused_ranks
            return self.stopping or not self.leads() or self._is_open(attempt) or is_refused

        with self._lock:
            self._wakes.changed.wait_for(is_decided, timeout_s)

    def _is_open(self, attempt: str) -> bool:
        return self._active is not None and self._active.generation.attempt == attempt

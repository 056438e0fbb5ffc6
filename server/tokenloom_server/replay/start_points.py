"""Where a run's next generation starts: pinned in the ledger by a restore, or by a fork of another run."""

from __future__ import annotations

import logging

from tokenloom_server.errors import ConfigError, LimitExceeded
from tokenloom_server.ledger.commands import Pin
from tokenloom_server.replay.past import Past
from tokenloom_server.replay.saved_snapshots import SavedSnapshots
from tokenloom_server.reports.stats import NextLaunch
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.fork import ForkHandler
from tokenloom_server.run.history import History

_log = logging.getLogger(__name__)

#: A restore goes forward through what it skips: at some ten million tokens a second that takes half an hour.
MAX_SKIPPED_TOKENS = 2**34


class StartPoints:
    """Pins where the next generation of a run starts."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        history: History,
        snapshots: SavedSnapshots,
        past: Past,
        forks: ForkHandler,
    ) -> None:
        self._coordinator = coordinator
        self._history = history
        self._snapshots = snapshots
        self._past = past
        self._forks = forks

    def restore(
        self,
        *,
        snapshot_id: str | None = None,
        sample_index: int | None = None,
        text: str | None = None,
        skip_samples: int = 0,
        skip_tokens: int = 0,
    ) -> NextLaunch:
        """Pins where the next launch begins, at one of the three points. The ``skip_samples`` after it are skipped, or
        ``skip_tokens`` rounded up to whole samples.

        Takes as long as going forward does. Raises ``ConfigError``, ``LimitExceeded``, ``SnapshotInvalid``,
        ``BeyondHorizon``, ``NotFound``.
        """
        points = [value for value in (snapshot_id, sample_index, text) if value is not None]
        if len(points) != 1:
            raise ConfigError(
                f"a restore names one of snapshot id, sample index and snapshot, but {len(points)} are given"
            )
        if skip_samples and skip_tokens:
            raise ConfigError(f"a restore skips {skip_samples} samples and {skip_tokens} tokens: give one of them")
        if snapshot_id is not None:
            text = self._snapshots.text(snapshot_id)
        elif sample_index is not None:
            text, _ = self._history.snapshot(sample_index)
        assert text is not None
        run = self._coordinator
        run.require_lead()
        point = self._history.parse(text)
        stored = run.ledger.read_run(run.name, run.stream)
        if stored is not None:
            self._history.refuse_foreign(point, stored)
        begin = point.sample_index
        skip = skip_samples or self._samples_of(begin, skip_tokens)
        self._refuse_long_skip(begin, skip)
        pin = self._past.pin(text, skip)
        for note in point.notes:
            _log.info("%s: %s", run.name, note)
        run.ledger.execute(Pin(run.uid, run.stream, run.lease.epoch, pin))
        _log.info(
            "%s: the next generation starts at sample %d, and %d are skipped (pinned)", run.name, begin + skip, skip
        )
        digest = point.digest or self._history.pinned(pin).point.digest
        assert digest is not None, "what is pinned has been gone forward to"
        return NextLaunch(sample_index=begin, digest=digest, skipped_samples=skip, start_index=begin + skip)

    def fork(self, text: str) -> NextLaunch:
        """Where another run stood, as its snapshot says. Raises ``ConfigError`` where this run has begun, and what
        ``ForkHandler.fork`` raises."""
        run = self._coordinator
        stored = run.ledger.read_run(run.name, run.stream)
        if stored is not None and stored.opening is not None:
            raise ConfigError(
                f"run {run.name!r} has begun (generation {stored.opening.generation}), and a fork is a new run: give "
                "it another name in its mixture file"
            )
        pin = self._past.pin(self._forks.fork(text), 0)
        run.ledger.execute(Pin(run.uid, run.stream, run.lease.epoch, pin))
        point = self._history.parse(pin)
        assert point.digest is not None, "what is pinned has been gone forward to"
        index = point.sample_index
        _log.info("%s: begins at sample %d, forked (pinned)", run.name, index)
        return NextLaunch(sample_index=index, digest=point.digest, skipped_samples=0, start_index=index)

    def _samples_of(self, begin: int, tokens: int) -> int:
        """So many tokens from a sample on, as whole samples."""
        timeline = self._coordinator.timeline
        return timeline.index_at(timeline.tokens_at(begin) + tokens) - begin

    def _refuse_long_skip(self, begin: int, skip: int) -> None:
        timeline = self._coordinator.timeline
        tokens = timeline.tokens_at(begin + skip) - timeline.tokens_at(begin)
        if tokens > MAX_SKIPPED_TOKENS:
            raise LimitExceeded(
                f"{skip} samples with {tokens} tokens are to be skipped; one restore goes forward through "
                f"{MAX_SKIPPED_TOKENS} at most"
            )

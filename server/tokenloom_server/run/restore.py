"""Restores: where the next launch of a run begins is proven, and pinned in the ledger; so is where a fork begins."""

from __future__ import annotations

import logging

from tokenloom_server.errors import ConfigError, LimitExceeded, NotFound
from tokenloom_server.order.segments import skip_content, skips_after
from tokenloom_server.reports.stats import NextLaunch
from tokenloom_server.run.fork import ForkHandler
from tokenloom_server.run.pins import PinnedPoint
from tokenloom_server.run.resume_points import ResumePoints

_log = logging.getLogger(__name__)

#: A restore goes forward through what it skips: at some ten million tokens a second that takes half an hour.
MAX_SKIPPED_TOKENS = 2**34


class Restores:
    """Pins where the next launch of one run begins; the present one goes on untouched. Thread-safe."""

    def __init__(self, points: ResumePoints, forks: ForkHandler) -> None:
        self._coordinator = points.coordinator
        self._points = points
        self._forks = forks

    def restore(
        self,
        *,
        snapshot_id: str | None = None,
        sample_index: int | None = None,
        text: str | None = None,
        skip_samples: int = 0,
        skip_tokens: int = 0,
        undo_skip: bool = False,
    ) -> NextLaunch:
        """Pins where the next launch begins, at one of the three points. The ``skip_samples`` of the order after it, or
        ``skip_tokens`` rounded up to whole samples, are passed over from then on; ``undo_skip``: what the point's state
        did not pass over no longer is.

        Takes as long as going forward does. Raises ``ConfigError``, ``LimitExceeded``, ``SnapshotInvalid``,
        ``BeyondHorizon``, ``NotFound``.
        """
        points = [value for value in (snapshot_id, sample_index, text) if value is not None]
        if len(points) != 1:
            raise ConfigError(
                f"a restore names one of snapshot id, sample index and snapshot, but {len(points)} are given"
            )
        if skip_samples and skip_tokens:
            raise ConfigError(
                f"a restore skips {skip_samples} samples and {skip_tokens} tokens: give one of them"
            )
        run = self._coordinator
        run.require_lead()
        while True:
            timeline = run.timeline
            if snapshot_id is not None:
                text = self._points.snapshots.saved(snapshot_id)
            elif sample_index is not None:
                text = self._points.snapshots.to_restore(sample_index, undo_skip)
            assert text is not None
            point, stored = self._points.parse(text), run.ledger.read_run(run.name, run.stream)
            if stored is not None:
                self._points.refuse_foreign(point, stored)
            pin = self.proven(text, skip_samples, skip_tokens, undo_skip)
            # Going forward takes its time: an opening, or a revision, may have changed what the run passes over.
            if run.pins.set(pin, timeline):
                break
        for note in point.notes:
            _log.info("%s: %s", run.name, note)
        _log.info(
            "%s: the next generation starts at sample %d (pinned)", run.name, pin.sample_index
        )
        for change in skip_content(dict(pin.skips))["changes"] if pin.skips is not None else ():
            _log.info("%s: from that generation on, %s", run.name, change)
        return pin.next_launch

    def cancel(self) -> NextLaunch:
        """Takes the pin back, and returns it: the next launch begins where it asks to. Raises ``NotFound`` where there
        is none, and the ledger's errors."""
        run = self._coordinator
        run.require_lead()
        pin = run.pins.pin
        if pin is None:
            raise NotFound(f"nothing is pinned for the next launch of run {run.name!r}")
        run.pins.set(None)
        _log.info("%s: what was pinned for the next generation is taken back", run.name)
        return pin.next_launch

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
        pin = self.proven(self._forks.fork(text))
        run.pins.set(pin)
        _log.info("%s: begins at sample %d, forked (pinned)", run.name, pin.sample_index)
        return pin.next_launch

    def proven(
        self, text: str, skip_samples: int = 0, skip_tokens: int = 0, undo_skip: bool = False
    ) -> PinnedPoint:
        """What is to be pinned of a snapshot: going forward to it proves it now, and not when the next job starts.

        Raises ``SnapshotInvalid``, ``BeyondHorizon`` where the data end among the samples to skip, and ``ConfigError``
        where there is nothing to undo.
        """
        points, timeline = self._points, self._coordinator.timeline
        point, known = points.parse(text), timeline.skips
        index = point.sample_index
        skipped = self._whole_samples(index, skip_samples, skip_tokens)
        if point.digest is None:
            # Of an older payload that only counts samples: what it stands for is known now.
            state = points.forward(point, timeline.before_skip(index), in_turn=True)
            text = self._points.snapshots.seal(state, point.generation, uid=point.run_uid)
            point = points.parse(text)
        skips = skips_after(dict(point.passed) if undo_skip else known, index, skipped)
        if undo_skip and skips == known:
            raise ConfigError(
                f"the state at sample {index} passed all skips of the run (at samples {[*known]}): to "
                "take one back, name its sample by --sample, or a sample or state before it"
            )
        pin = PinnedPoint(
            text, index, point.digest or "", [*skips.items()] if skips != known else None
        )
        points.forward(point, points.pinned(pin), in_turn=True)
        return pin

    def _whole_samples(self, begin: int, samples: int, tokens: int) -> int:
        """So many samples from a sample on, or tokens as whole samples; with ``batching``, whole batches."""
        config = self._coordinator.timeline.at(begin).config
        samples = samples or -(-tokens // config.pick_tokens) * config.pick_samples
        tokens = samples * config.sequence_length
        if tokens > MAX_SKIPPED_TOKENS:
            raise LimitExceeded(
                f"{samples} samples with {tokens} tokens are to be skipped; one restore goes forward through "
                f"{MAX_SKIPPED_TOKENS} at most"
            )
        return samples

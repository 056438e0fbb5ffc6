"""Where a run's next generation starts: pinned in the ledger by a restore, or by a fork of another run."""

from __future__ import annotations

import logging

from tokenloom_server.errors import ConfigError, LimitExceeded, NotFound
from tokenloom_server.order.segments import skip_content
from tokenloom_server.replay.past import Past
from tokenloom_server.reports.stats import NextLaunch
from tokenloom_server.run.fork import ForkHandler
from tokenloom_server.run.stats import next_launch

_log = logging.getLogger(__name__)

#: A restore goes forward through what it skips: at some ten million tokens a second that takes half an hour.
MAX_SKIPPED_TOKENS = 2**34


class StartPoints:
    """Pins where the next generation of a run starts."""

    def __init__(self, past: Past, forks: ForkHandler) -> None:
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
            raise ConfigError(f"a restore skips {skip_samples} samples and {skip_tokens} tokens: give one of them")
        run = self._past.coordinator
        run.require_lead()
        is_pinned = False
        while not is_pinned:
            timeline = run.timeline
            if snapshot_id is not None:
                text = self._past.states.saved(snapshot_id)
            elif sample_index is not None:
                text = self._past.states.text_to_restore(sample_index, undo_skip)
            assert text is not None
            point = self._past.states.parse(text)
            stored = run.ledger.read_run(run.name, run.stream)
            if stored is not None:
                self._past.states.refuse_foreign(point, stored)
            skip = self._whole_samples(point.sample_index, skip_samples, skip_tokens)
            pin = self._past.states.pin(text, skip, undo_skip, self._past.forward)
            # Going forward takes its time: an opening, or a revision, may have changed what the run passes over.
            is_pinned = run.pins.set(pin, timeline)
        for note in point.notes:
            _log.info("%s: %s", run.name, note)
        _log.info("%s: the next generation starts at sample %d (pinned)", run.name, point.sample_index)
        for change in skip_content(dict(pin.skips))["changes"] if pin.skips is not None else ():
            _log.info("%s: from that generation on, %s", run.name, change)
        return next_launch(pin)

    def cancel(self) -> NextLaunch:
        """Takes the pin back, and returns it: the next launch begins where it asks to. Raises ``NotFound`` where there
        is none, and the ledger's errors."""
        run = self._past.coordinator
        run.require_lead()
        pin = run.pins.pin
        if pin is None:
            raise NotFound(f"nothing is pinned for the next launch of run {run.name!r}")
        run.pins.set(None)
        _log.info("%s: what was pinned for the next generation is taken back", run.name)
        return next_launch(pin)

    def fork(self, text: str) -> NextLaunch:
        """Where another run stood, as its snapshot says. Raises ``ConfigError`` where this run has begun, and what
        ``ForkHandler.fork`` raises."""
        run = self._past.coordinator
        stored = run.ledger.read_run(run.name, run.stream)
        if stored is not None and stored.opening is not None:
            raise ConfigError(
                f"run {run.name!r} has begun (generation {stored.opening.generation}), and a fork is a new run: give "
                "it another name in its mixture file"
            )
        pin = self._past.states.pin(self._forks.fork(text), advance=self._past.forward)
        run.pins.set(pin)
        launch = next_launch(pin)
        _log.info("%s: begins at sample %d, forked (pinned)", run.name, launch.sample_index)
        return launch

    def _whole_samples(self, begin: int, samples: int, tokens: int) -> int:
        """So many samples from a sample on, or tokens as whole samples; with ``batching``, whole batches."""
        config = self._past.coordinator.timeline.at(begin).config
        samples = samples or -(-tokens // config.pick_tokens) * config.pick_samples
        tokens = samples * config.sequence_length
        if tokens > MAX_SKIPPED_TOKENS:
            raise LimitExceeded(
                f"{samples} samples with {tokens} tokens are to be skipped; one restore goes forward through "
                f"{MAX_SKIPPED_TOKENS} at most"
            )
        return samples

"""A run's history as it is kept: its points, its events, and which points are kept for how long."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenloom_server.reports.history import EventKind
from tokenloom_server.reports.stats import RunStats

#: Characters of an event that are kept.
MAX_TEXT, MAX_AUTHOR = 500, 100
#: Over the whole run about so many points are kept, evenly; and as many more of the newest, for each doubling of age.
EVEN_POINTS, NEW_POINTS = 1200, 64
#: With more sources than these, fewer points are kept, so that all take the same room.
FULL_SOURCES = 64
#: Fields of a point that are the run's, those of what its trainer reported last, and those of each source: lists by id.
OF_RUN = (
    "generation",
    "sample_index",
    "total_tokens",
    "world_size",
    "tokens_per_s",
    "data_wait_share",
    "window_fill",
)
OF_REPORT = ("loss", "learning_rate", "step")
OF_SOURCE = ("tokens", "target_share", "expected_share", "loss", "epoch")


def point_text(stats: RunStats) -> str:
    """A run at one moment, as JSON."""
    point = {name: _rounded(getattr(stats, name)) for name in OF_RUN}
    point |= {name: _rounded(getattr(stats.reported, name, None)) for name in OF_REPORT}
    point["loss"] = _rounded(getattr(stats.reported, "smoothed_loss", None))
    point["sources"] = {
        name: [_rounded(getattr(one, name)) for one in stats.sources] for name in OF_SOURCE
    }
    if stats.count == "real":
        # What shares are of.
        point["real_tokens"] = [one.tokens - one.padding_tokens for one in stats.sources]
    return json.dumps(point, separators=(",", ":"))


class Event(NamedTuple):
    """See ``RunEvent``."""

    kind: EventKind
    time: float
    text: str
    sample_index: int
    total_tokens: int
    generation: int
    author: str = ""

    def as_json(self) -> str:
        cut = self._replace(text=self.text[:MAX_TEXT], author=self.author[:MAX_AUTHOR])
        return json.dumps(cut._asdict(), ensure_ascii=False, separators=(",", ":"))


def is_kept(number: int, newest: int, sources: int) -> bool:
    """Whether a point is kept that was the ``number``-th, once there is a ``newest``.

    The older part of a run has its points evenly over all that were recorded, so that pauses take none; the newer a
    part is, the denser. What was dropped once is never asked for again: strides are powers of two, and only grow.
    """
    part = max(1, sources / FULL_SOURCES)
    stride = 1
    while (
        newest >= stride * EVEN_POINTS / part and newest - number >= 2 * stride * NEW_POINTS / part
    ):
        stride *= 2
    return number % stride == 0


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value

"""A run's history as it is kept, and as it is read: its points, its events, which points are kept for how long, and the
curves that follow from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tokenloom_server.ledger.base import HistoryEntry
from tokenloom_server.reports.history import (
    EventKind,
    RunEvent,
    RunEvents,
    RunHistory,
    SourceHistory,
)
from tokenloom_server.reports.stats import RunStats
from tokenloom_server.run.coordinator import RunCoordinator

#: Points and events are written at most this often, seconds.
EVERY_S = 10.0
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


class HistoryReader:
    """Reads one run's history, on any server of its ledger. Thread-safe."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        self._coordinator = coordinator
        self._store = coordinator.ledger.history()

    def read(self, since: float, until: float, most: int) -> RunHistory:
        """At most so many points from one Unix time to another, evenly. Raises the ledger's errors."""
        entries = [entry for entry in self._entries("points") if since <= entry.time <= until]
        if len(entries) > most:
            entries = [entries[place * (len(entries) - 1) // (most - 1)] for place in range(most)]
        points = [(entry.time, json.loads(entry.text)) for entry in self._read(entries)]
        rewound = self._rewound()
        return RunHistory(
            run=self._coordinator.name,
            stream=self._coordinator.stream,
            every_s=EVERY_S,
            time=[time for time, _ in points],
            rewound=[rewound(point) for _, point in points],
            sources=self._sources([point for _, point in points]),
            **{name: [point[name] for _, point in points] for name in (*OF_RUN, *OF_REPORT)},
        )

    def events(self, since: float, until: float, kinds: Sequence[str] = ()) -> RunEvents:
        """The events from one Unix time to another, of some kinds or all. Raises the ledger's errors."""
        entries = self._entries("events", "frequent")
        rewound = self._rewound()
        events = []
        for entry in self._read([entry for entry in entries if since <= entry.time <= until]):
            event = json.loads(entry.text)
            if not kinds or event["kind"] in kinds:
                events.append(RunEvent(id=entry.number, rewound=rewound(event), **event))
        return RunEvents(
            run=self._coordinator.name,
            stream=self._coordinator.stream,
            dropped=entries[-1].number + 1 - len(entries) if entries else 0,
            events=sorted(events, key=lambda event: (event.time, event.id)),
        )

    def _entries(self, *kinds: Any) -> list[HistoryEntry]:
        run = self._coordinator
        return self._store.entries(run.uid, run.stream, *kinds) if self._store is not None else []

    def _read(self, entries: Sequence[HistoryEntry]) -> list[HistoryEntry]:
        run = self._coordinator
        return (
            self._store.read(run.uid, run.stream, entries)
            if self._store is not None and entries
            else []
        )

    def _rewound(self) -> Callable[[dict[str, Any]], bool]:
        """Whether a later generation began before a point or event."""
        run, least, began = self._coordinator, float("inf"), {}
        for opening in reversed(run.ledger.openings(run.uid, run.stream)):
            began[opening.generation] = least
            least = min(least, opening.start_index)
        return lambda point: began.get(point["generation"], least) < point["sample_index"]

    def _sources(self, points: Sequence[dict[str, Any]]) -> list[SourceHistory]:
        rows: dict[str, list[Any]] = {
            name: [point["sources"][name] for point in points] for name in OF_SOURCE
        }
        consumed = [point.get("real_tokens") or point["sources"]["tokens"] for point in points]
        rows["actual_share"] = [_shares(counts, []) for counts in consumed]
        rows["window_share"] = [
            [],
            *(_shares(after, before) for before, after in pairwise(consumed)),
        ][: len(points)]
        return [
            SourceHistory(
                id=source.id,
                spec=source.source,
                alias=source.name,
                **{
                    name: [row[i] if i < len(row) else None for row in of]
                    for name, of in rows.items()
                },
            )
            for i, source in enumerate(self._coordinator.timeline.segments[-1].config.sources)
        ]


def _shares(now: Sequence[int], before: Sequence[int]) -> list[float]:
    """Each source's share of the tokens between two points; empty where there are none, or a launch went back."""
    tokens = [
        count - (before[source] if source < len(before) else 0) for source, count in enumerate(now)
    ]
    total = sum(tokens)
    return [count / total for count in tokens] if total > 0 and min(tokens) >= 0 else []

"""A run over time: its curves and its events, as JSON or CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.responses import Response

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import RunName
from tokenloom_server.api.rest.routes import AppBackend, Routes
from tokenloom_server.errors import ConfigError
from tokenloom_server.reports.history import (
    EventKind,
    RunEvent,
    RunEvents,
    RunHistory,
    SourceHistory,
)

#: Points of one answer.
MAX_POINTS = 2000
_TIME = "Unix seconds, or ISO 8601 such as 2026-01-31T22:00:00Z (UTC where it names no zone)"
From = Annotated[
    str | None, Query(alias="from", description=f"From this time on: {_TIME}.", max_length=40)
]
To = Annotated[str | None, Query(description=f"Up to this time: {_TIME}.", max_length=40)]
Points = Annotated[
    int, Query(description="At most so many points, evenly over those kept.", ge=2, le=MAX_POINTS)
]
Form = Annotated[
    Literal["json", "csv"],
    Query(alias="format", description="JSON, or a table as CSV with one line of names."),
]
_FORMULA = tuple("=+-@\t\r")
_CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}}
}


ROUTES = Routes()
_add = partial(
    ROUTES.add, "GET", scope=Scope.READ, errors=(404, 503), tags=["runs"], responses=_CSV
)


@_add("/v1/runs/{run}/history", response_model=RunHistory)
def read_history(
    backend: AppBackend,
    run: RunName,
    since: From = None,
    to: To = None,
    points: Points = MAX_POINTS,
    form: Form = "json",
) -> Any:
    """A run over time.

    Tokens and shares by source, tokens/s, waits, losses, learning rate: a point every ten seconds at most, thinned
    with age to about 2,000. What a later launch took back stays, marked as rewound. As CSV a line is a point, and
    each source has columns of its own.
    """
    history = backend.runs.get(run).history.read(*_span(since, to), points)
    return history if form == "json" else _csv(_history_table(history))


@_add("/v1/runs/{run}/events", response_model=RunEvents)
def read_events(
    backend: AppBackend,
    run: RunName,
    since: From = None,
    to: To = None,
    kind: Annotated[
        list[EventKind] | None, Query(description="Of these kinds; of all if not given.")
    ] = None,
    form: Form = "json",
) -> Any:
    """What happened to a run.

    Launches, rewinds, revisions, fail-overs, bad rows, errors and who changed what; the newest 2,000 or so.
    """
    events = backend.runs.get(run).history.events(*_span(since, to), kind or ())
    table = [[*RunEvent.model_fields], *(event.model_dump().values() for event in events.events)]
    return events if form == "json" else _csv(table)


def _span(since: str | None, to: str | None) -> tuple[float, float]:
    first = -math.inf if since is None else _time("from", since)
    last = math.inf if to is None else _time("to", to)
    if first > last:
        raise ConfigError(f"query: from is {since}, which is later than to, {to}; swap them")
    return first, last


def _time(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigError(f"query: {name} is {text!r}; expected {_TIME}")
    return seconds


def _history_table(history: RunHistory) -> Iterable[Sequence[object]]:
    of_run = [
        name
        for name in RunHistory.model_fields
        if name not in ("run", "stream", "every_s", "sources")
    ]
    of_source = [name for name in SourceHistory.model_fields if name not in ("id", "spec", "alias")]
    columns = {name: getattr(history, name) for name in of_run}
    columns |= {
        f"{name}[{own.alias}]": getattr(own, name) for own in history.sources for name in of_source
    }
    return [[*columns], *zip(*columns.values(), strict=True)]


def _csv(table: Iterable[Iterable[object]]) -> Response:
    text = io.StringIO()
    csv.writer(text).writerows(map(_text_cell, row) for row in table)
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8")


def _text_cell(cell: object) -> object:
    """A text that a spreadsheet would take for a formula, and work out, begins with an apostrophe instead."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell

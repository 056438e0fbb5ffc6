"""REST routes that an entry point hands to the server: a plan's picture, receipts, traces."""

from __future__ import annotations

import threading
from typing import Annotated

from fastapi import Path, Query
from starlette.responses import Response
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import COUNTER, RunName
from tokenloom_server.api.rest.resources.plan import ERRORS, Tokens, one_plan
from tokenloom_server.api.rest.routes import AppBackend, Backend, Routes
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.errors import ConfigError
from tokenloom_server.planning.plan import RunPlan

from tokenloom_tools.receipts import Receipts
from tokenloom_tools.reports.documents import Receipt, RunReport, TracedMicroStep, TracedSample
from tokenloom_tools.reports.picture import draw
from tokenloom_tools.trace import Traces

ROUTES = Routes()

#: A picture's colours are styles within it; it needs nothing else, and no script.
_PICTURE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
}


class Pictures:
    """One picture at a time: matplotlib's settings are the process's."""

    def __init__(self, backend: Backend) -> None:
        self._drawing = threading.Lock()

    def draw(self, plan: RunPlan) -> bytes:
        """As SVG. Raises ``ConfigError`` without matplotlib."""
        with self._drawing:
            return draw(plan, "svg")


@ROUTES.add(
    "GET",
    "/v1/runs/{run}/plan.svg",
    Scope.READ,
    errors=ERRORS,
    tags=["runs"],
    response_class=Response,
    responses={
        200: {
            "content": {"image/svg+xml": {"schema": {"type": "string"}}},
            "description": "The picture.",
        }
    },
)
def draw_plan(backend: AppBackend, run: RunName, tokens: Tokens = None) -> Response:
    """The plan as a picture.

    Stacked shares over the run's tokens. Needs `pip install 'tokenloom[plot]'` at the server.
    """
    with one_plan(backend, tokens) as until:
        picture = backend.companion(Pictures).draw(backend.runs.get(run).plan(until))
    return Response(picture, media_type="image/svg+xml", headers=_PICTURE_HEADERS)


@ROUTES.add("GET", "/v1/runs/{run}/receipt", Scope.READ, errors=(416, 429, 500), tags=["receipts"])
def read_receipt(
    backend: AppBackend,
    run: RunName,
    sample_index: Annotated[
        int | None, Query(description="The committed one if not given.", examples=[4096], **COUNTER)
    ] = None,
) -> Receipt:
    """Which data a run had up to a sample index.

    The rolling digest at any committed sample index, and what it depends on. Two runs with the same digest at the
    same index had the same samples before it, on any topology. An index that is not at hand is gone forward to,
    from the nearest state in the ledger's journal, in turns with peeks.
    """
    return backend.runs.get(run).companion(Receipts).receipt(sample_index)


@ROUTES.add("GET", "/v1/runs/{run}/report", Scope.READ, errors=(429, 500), tags=["receipts"])
def read_report(backend: AppBackend, run: RunName) -> RunReport:
    """What a model card says about a run's data.

    Per source: files and their digest, tokens, unique tokens, epochs. Tokeniser, seed, digests, launches, versions
    of software.
    """
    return backend.runs.get(run).companion(Receipts).report()


_ERRORS = (409, 416, 429, 500)
Generation = Annotated[
    int | None,
    Query(
        description="The generation whose line to follow, where a later one rewound it; the present one if not given.",
        **COUNTER,
    ),
]
Text = Annotated[
    bool,
    Query(description="Also each document's text, what of it counts for the loss, and the ids."),
]


@ROUTES.add("GET", "/v1/runs/{run}/samples", Scope.READ, errors=_ERRORS, tags=["trace"])
def trace_sample_of_source(
    backend: AppBackend,
    run: RunName,
    source: Annotated[
        str, Query(description="The source's alias or spec.", max_length=4096, examples=["code"])
    ],
    number: Annotated[
        int | None,
        Query(
            description="Of the source's samples, from 0; one at random if not given.", **COUNTER
        ),
    ] = None,
    text: Text = False,
) -> TracedSample:
    """A committed sample of a source, by its number or at random.

    Each is as likely as the others. Samples that were passed over have no number. Made again as any sample is.
    """
    return backend.runs.get(run).companion(Traces).of_source(source, number, text)


@ROUTES.add("GET", "/v1/runs/{run}/samples/{index}", Scope.READ, errors=_ERRORS, tags=["trace"])
def trace_sample(
    backend: AppBackend,
    run: RunName,
    index: Annotated[int, Path(description="The sample index.", examples=[4096], **COUNTER)],
    generation: Generation = None,
    text: Text = False,
    stream: Annotated[
        str, Query(description="The stream; one that is evaluated on may be named.", max_length=512)
    ] = TRAIN,
) -> TracedSample:
    """The documents of a sample that was delivered.

    Made again by going forward from the nearest state that is known, in turns with the peeks. Of another stream
    than training's: of a sample that was evaluated on since the server started.
    """
    traces = backend.runs.get(run).companion(Traces)
    if stream == TRAIN:
        return traces.sample(index, generation, text)
    if generation is not None:
        raise ConfigError(
            f"generation: a stream that is evaluated on ({stream!r}) has none; leave it out"
        )
    return traces.evaluated(stream, index, text)


@ROUTES.add(
    "GET", "/v1/runs/{run}/micro-steps/{micro_step}", Scope.READ, errors=_ERRORS, tags=["trace"]
)
def trace_micro_step(
    backend: AppBackend,
    run: RunName,
    micro_step: Annotated[
        int, Path(description="The micro-step, from 0.", examples=[128], **COUNTER)
    ],
    rank: Annotated[int | None, Query(description="One rank; all if not given.", **COUNTER)] = None,
    generation: Generation = None,
    text: Text = False,
) -> TracedMicroStep:
    """What the ranks got in a micro-step, and its documents.

    Micro-steps are counted from 0 in each generation. A trace has at most 2^20 tokens: of a large micro-step ask
    for one rank.
    """
    return backend.runs.get(run).companion(Traces).micro_step(micro_step, rank, generation, text)

"""What a past sample, or a micro-step by rank, was made of."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import COUNTER, RunName
from tokenloom_server.api.rest.routes import AppBackend, Routes
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.errors import ConfigError

from tokenloom_tools.past.trace import Traces
from tokenloom_tools.reports.trace import TracedMicroStep, TracedSample

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


ROUTES = Routes()


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

"""The routes, and how OpenAPI documents them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import Body, FastAPI, Path, Query
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope as RequestScope
from tokenloom_proto.seal import unseal

from tokenloom_server.api.auth import ROUTES, Access, Scope
from tokenloom_server.api.metrics import create_registry
from tokenloom_server.api.page import page_routes
from tokenloom_server.api.rest.guard import MAX_BODY_BYTES, Guard
from tokenloom_server.api.rest.models import (
    Alive,
    ErrorBody,
    ForkRequest,
    Ready,
    RestoreRequest,
    RunList,
    SnapshotRequest,
    SnapshotSaved,
)
from tokenloom_server.api.rest.problems import add_error_handlers
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.core.amounts import parse_amount
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import LimitExceeded, TokenloomError
from tokenloom_server.planning.picture import draw
from tokenloom_server.planning.plan import RunPlan
from tokenloom_server.reports.receipt import Receipt, RevisionInfo, RunReport
from tokenloom_server.reports.stats import MixtureInfo, ResumePoint, RunLosses, RunService, RunStats, SnapshotInfo
from tokenloom_server.reports.trace import TracedSample, TracedStep

RunName = Annotated[
    str,
    Path(
        description="The run's name, as in its mixture file.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        examples=["wiki-and-code"],
    ),
]
#: Plans at once: the first of a run reads from storage, and each waits in a thread that other requests need.
MAX_PLANS = 4
#: A picture's colours are styles within it; it needs nothing else, and no script.
_OF_A_PICTURE = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
Tokens = Annotated[
    str | None,
    Query(
        description="Plan up to this total of the run's tokens, such as 2000000, 500M, 10B or 1.5T; to the end if not "
        "given.",
        max_length=32,
        examples=["10B"],
    ),
]
_UNTOLD = "this server is not ready; why is told to who brings its token, and stands in its log"
SnapshotId = Annotated[
    str,
    Path(description="The id that saving the snapshot gave.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"),
]

_NUMBER = {"ge": 0, "le": MAX_COUNTER}
Generation = Annotated[
    int | None,
    Query(
        description="The generation whose line to follow, where a later one rewound it; the present one if not given.",
        **_NUMBER,
    ),
]
Text = Annotated[bool, Query(description="Also each document's text, and each sample's ids.")]


def create_app(
    service: RunService,
    *,
    version: str,
    grpc_address: str | None = None,
    allowed_hosts: Collection[str] = (),
    access: Access | None = None,
) -> FastAPI:
    """The REST interface to ``service``, with its own metrics registry. Without ``access`` everything is open.

    ``grpc_address`` is shown to people who have no trainer yet. ``allowed_hosts`` are DNS names that the
    server answers to besides IP addresses, localhost and names without a dot (see ``Guard``).
    """
    app = _App(
        title="Tokenloom",
        version=version,
        summary="Figures, snapshots and restore of training runs' data.",
        description='Every error is `{"error": name, "message": text}`. POST requests must carry '
        "`Content-Type: application/json`, with or without a body.",
        docs_url=None,  # both load their scripts from elsewhere, which users behind firewalls cannot
        redoc_url=None,
        redirect_slashes=False,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    _add_run_routes(app, service, version, grpc_address)
    _add_health_routes(app, service, version, access or Access())
    app.router.routes.extend(page_routes())
    add_error_handlers(app)
    app.add_middleware(
        Guard,
        allowed_hosts=frozenset(name.lower() for name in (*allowed_hosts, socket.gethostname())),
        access=access or Access(),
        needed=partial(_needed, app),
    )
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _with_scopes(super().openapi())
        return self.openapi_schema


def _needed(app: FastAPI, scope: RequestScope) -> Scope:
    """What the route of a request asks for; where there is no such route, its absence is for readers to know."""
    for route in app.routes:
        if route.matches(scope)[0] is Match.FULL:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            return ROUTES.get((method, getattr(route, "path", "")), Scope.CONTROL)
    return Scope.READ


def _with_scopes(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the token that each route asks for, and the answer to who has none."""
    schema["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "Where the server was started with a token."}
    }
    refused = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            needed = ROUTES.get((method.upper(), path), Scope.CONTROL)
            if needed is not Scope.OPEN:
                operation["security"] = [{"token": [needed.name.lower()]}]
                operation["responses"]["401"] = {"description": "`Unauthenticated`: no token, or another.", **refused}
    return schema


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route for OpenAPI; those of ``Guard`` come with every route."""
    meanings = {
        404: "No such run or snapshot.",
        409: "The run is in a state that does not allow this, such as `SourceChanged`.",
        413: f"`BodyTooLarge`: more than {MAX_BODY_BYTES} bytes.",
        415: "`ContentTypeRequired`: a POST without `Content-Type: application/json`.",
        416: "`BeyondHorizon`: that sample has not been and may not yet be produced, or its state is gone.",
        429: "`TooManyPeeks`: as many look at the run as a server makes samples for at once; try again.",
        422: "A field is not what is expected, or the snapshot is refused (`InvalidRequest`, `SnapshotInvalid`).",
        500: "A source, the tokeniser or the server failed.",
        503: "The ledger cannot be reached, another server leads, or this one is starting or stopping.",
        403: "`OriginRefused`: a browser sent this for a page of another host. `Forbidden`: the token is for reading.",
        421: "`HostRefused`: the Host header is not a name of this server.",
    }
    return {status: {"model": ErrorBody, "description": meanings[status]} for status in (403, *statuses, 421)}


def _add_run_routes(app: FastAPI, service: RunService, version: str, grpc_address: str | None) -> None:
    @app.get("/v1/runs", summary="The runs of this server", tags=["runs"], responses=_errors(503))
    def list_runs() -> RunList:
        return RunList(runs=service.names(), version=version, grpc_address=grpc_address)

    @app.get(
        "/v1/runs/{run}/stats",
        summary="A run's figures",
        description="Counters are committed ones: they move when every rank has acknowledged and the ledger holds it.",
        tags=["runs"],
        responses=_errors(404, 422, 503),
    )
    def read_stats(run: RunName) -> RunStats:
        return service.stats(run)

    @app.get(
        "/v1/runs/{run}/losses",
        summary="The losses that trainers reported, by source",
        description="A curve over the run, of some hundreds of points however long it is. This server keeps it in its "
        "memory: after a restart it is empty.",
        tags=["runs"],
        responses=_errors(404, 422, 503),
    )
    def read_losses(run: RunName) -> RunLosses:
        return service.losses(run)

    places = threading.BoundedSemaphore(MAX_PLANS)
    drawing = threading.Lock()

    @contextmanager
    def place() -> Iterator[None]:
        if not places.acquire(blocking=False):
            raise LimitExceeded(
                f"{MAX_PLANS} plans are being made, and this server makes no more at once, so that other requests find "
                "a thread; ask again"
            )
        try:
            yield
        finally:
            places.release()

    @app.get(
        "/v1/runs/{run}/plan",
        summary="What the run will be",
        description="From where it is committed: when each source runs out, epochs, shares over the run's tokens, and "
        "where it ends. Reads a sample of each source the first time, which takes seconds.",
        tags=["runs"],
        responses=_errors(404, 409, 422, 500, 503),
    )
    def read_plan(run: RunName, tokens: Tokens = None) -> RunPlan:
        with place():
            return service.plan(run, _until(tokens))

    @app.get(
        "/v1/runs/{run}/plan.svg",
        summary="The plan as a picture",
        description="Stacked shares over the run's tokens. Needs `pip install 'tokenloom[plot]'` at the server.",
        tags=["runs"],
        response_class=Response,
        responses={
            200: {"content": {"image/svg+xml": {"schema": {"type": "string"}}}, "description": "The picture."},
            **_errors(404, 409, 422, 500, 503),
        },
    )
    def draw_plan(run: RunName, tokens: Tokens = None) -> Response:
        with place():
            plan = service.plan(run, _until(tokens))
            # matplotlib's settings are the process's: one picture at a time.
            with drawing:
                picture = draw(plan, "svg")
        return Response(picture, media_type="image/svg+xml", headers=_OF_A_PICTURE)

    @app.get(
        "/v1/runs/{run}/receipt",
        summary="Which data a run had up to a sample index",
        description="The rolling digest at any committed sample index, and what it depends on. Two runs with the same "
        "digest at the same index had the same samples before it, on any topology. An index that is not at hand is "
        "gone forward to, from the nearest state in the ledger's journal, in turns with peeks.",
        tags=["receipts"],
        responses=_errors(404, 416, 422, 429, 500, 503),
    )
    def read_receipt(
        run: RunName,
        sample_index: Annotated[
            int | None,
            Query(ge=0, le=MAX_COUNTER, description="The committed one if not given.", examples=[4096]),
        ] = None,
    ) -> Receipt:
        return service.receipt(run, sample_index)

    @app.get(
        "/v1/runs/{run}/report",
        summary="What a model card says about a run's data",
        description="Per source: files and their digest, tokens, unique tokens, epochs. Tokeniser, seed, digests, "
        "launches, versions of software.",
        tags=["receipts"],
        responses=_errors(404, 422, 429, 500, 503),
    )
    def read_report(run: RunName) -> RunReport:
        return service.report(run)

    @app.post(
        "/v1/runs/{run}/snapshots",
        status_code=201,
        summary="Take a snapshot and save it in the ledger",
        tags=["snapshots"],
        responses=_errors(404, 409, 413, 415, 416, 422, 500, 503),
    )
    def save_snapshot(
        run: RunName,
        request: Annotated[
            SnapshotRequest | None,
            Body(
                openapi_examples={
                    "committed": {"summary": "At the committed sample index", "value": {}},
                    "earlier": {"summary": "At an earlier sample index", "value": {"sample_index": 4096}},
                }
            ),
        ] = None,
    ) -> SnapshotSaved:
        text, snapshot_id = service.snapshot(run, request.sample_index if request else None, True)
        assert snapshot_id is not None, "a saved snapshot has an id"
        content = unseal(text)
        return SnapshotSaved(
            id=snapshot_id,
            sample_index=content["sample_index"],
            digest=content["digest"],
            total_tokens=content["total_tokens"],
        )

    @app.get(
        "/v1/runs/{run}/snapshots",
        summary="The snapshots saved in the ledger",
        tags=["snapshots"],
        responses=_errors(404, 422, 503),
    )
    def list_snapshots(run: RunName) -> list[SnapshotInfo]:
        return service.snapshots(run)

    @app.get(
        "/v1/runs/{run}/snapshots/{snapshot_id}",
        summary="A saved snapshot, byte for byte",
        description="The sealed text itself, unchanged: its checksum covers these bytes.",
        tags=["snapshots"],
        response_class=Response,
        responses={
            200: {"content": {"application/json": {"schema": {"type": "object"}}}, "description": "The sealed text."},
            **_errors(404, 422, 503),
        },
    )
    def read_snapshot(run: RunName, snapshot_id: SnapshotId) -> Response:
        return Response(service.saved_snapshot(run, snapshot_id), media_type="application/json")

    @app.post(
        "/v1/runs/{run}/restore",
        summary="Pin where the next generation starts",
        description="Nothing moves until the next trainer opens its generation. One that brings a state of its own "
        "must bring this one; another is refused with both named. Samples to skip are jumped over behind it, are "
        "counted apart, and may take a while: the server goes forward through them.",
        tags=["snapshots"],
        responses=_errors(404, 409, 413, 415, 416, 422, 500, 503),
    )
    def restore(
        run: RunName,
        request: Annotated[
            RestoreRequest,
            Body(
                openapi_examples={
                    "saved": {"summary": "A saved snapshot", "value": {"snapshot_id": "4096-1f9a3c0d72be"}},
                    "index": {"summary": "A sample index", "value": {"sample_index": 4096}},
                    "skip": {
                        "summary": "A sample index, and a range behind it that is jumped over",
                        "value": {"sample_index": 4096, "skip_samples": 512},
                    },
                    "text": {
                        "summary": "A snapshot out of a checkpoint",
                        "value": {"snapshot": '{"checksum":"sha256:…","format_version":1,…}'},
                    },
                }
            ),
        ],
    ) -> ResumePoint:
        return service.restore(
            run,
            snapshot_id=request.snapshot_id,
            sample_index=request.sample_index,
            text=request.snapshot,
            skip_samples=request.skip_samples,
            skip_tokens=request.skip_tokens,
        )

    @app.get(
        "/v1/runs/{run}/samples/{index}",
        summary="The documents of a sample that was delivered",
        description="Made again by going forward from the nearest state that is known, in turns with the peeks. Of "
        "another stream than training's: of a sample that was evaluated on since the server started.",
        tags=["trace"],
        responses=_errors(404, 409, 416, 422, 429, 500, 503),
    )
    def trace_sample(
        run: RunName,
        index: Annotated[int, Path(description="The sample index.", examples=[4096], **_NUMBER)],
        generation: Generation = None,
        text: Text = False,
        stream: Annotated[
            str, Query(description="The stream; one that is evaluated on may be named.", max_length=512)
        ] = "train",
    ) -> TracedSample:
        return service.trace_sample(run, index, generation=generation, text=text, stream=stream)

    @app.get(
        "/v1/runs/{run}/steps/{step}",
        summary="What the ranks got in a step, and its documents",
        description="Steps are counted from 0 in each generation. A trace has at most 2^20 tokens: of a large step ask "
        "for one rank.",
        tags=["trace"],
        responses=_errors(404, 409, 416, 422, 429, 500, 503),
    )
    def trace_step(
        run: RunName,
        step: Annotated[int, Path(description="The step, from 0.", examples=[128], **_NUMBER)],
        rank: Annotated[int | None, Query(description="One rank; all if not given.", **_NUMBER)] = None,
        generation: Generation = None,
        text: Text = False,
    ) -> TracedStep:
        return service.trace_step(run, step, rank=rank, generation=generation, text=text)

    @app.post(
        "/v1/runs/{run}/fork",
        summary="Begin a run where another one stands",
        description="The run must not have begun. Cursors of the sources that both have stay; sample index, tokens and "
        "rolling digest go on. Nothing moves until the first trainer opens the run, which is to bring no state.",
        tags=["snapshots"],
        responses=_errors(404, 409, 413, 415, 416, 422, 500, 503),
    )
    def fork(
        run: RunName,
        request: Annotated[
            ForkRequest,
            Body(
                openapi_examples={
                    "run": {
                        "summary": "Where a run of this server stood",
                        "value": {"parent": "base", "sample_index": 4096},
                    },
                    "text": {
                        "summary": "A snapshot out of a checkpoint",
                        "value": {"snapshot": '{"checksum":"sha256:…","format_version":1,…}'},
                    },
                }
            ),
        ],
    ) -> ResumePoint:
        return service.fork(run, parent=request.parent, sample_index=request.sample_index, text=request.snapshot)

    @app.get(
        "/v1/runs/{run}/mixture",
        summary="The mixture in force, and what changes it",
        tags=["mixture"],
        responses=_errors(404, 422, 503),
    )
    def read_mixture(run: RunName) -> MixtureInfo:
        return service.mixture(run)

    @app.patch(
        "/v1/runs/{run}/mixture",
        summary="Change the mixture while the run trains",
        description="Holds from the next state boundary behind all that may have been produced, or from a later sample "
        "index or token count. Journalled before production passes it; snapshots carry it, and a restore applies it "
        "again at its index.",
        tags=["mixture"],
        responses=_errors(404, 409, 413, 415, 416, 422, 500, 503),
    )
    def revise(
        run: RunName,
        change: Annotated[
            MixtureChange,
            Body(
                openapi_examples={
                    "weight": {
                        "summary": "Another weight",
                        "value": {"reason": "more code", "author": "ada", "set": [{"child": "code", "weight": 3}]},
                    },
                    "pause": {
                        "summary": "Pause a source from a token count on",
                        "value": {
                            "reason": "loss spikes",
                            "set": [{"child": "web", "paused": True}],
                            "total_tokens": 2_000_000_000,
                        },
                    },
                    "new": {
                        "summary": "A new source, and one that leaves",
                        "value": {
                            "reason": "second crawl",
                            "add": [{"child": {"source": "parquet:data/crawl2-*.parquet:text", "weight": 2}}],
                            "drop": ["crawl1"],
                        },
                    },
                    "take-down": {
                        "summary": "Rows to leave out",
                        "value": {"reason": "ticket 42", "exclude": {"file": "takedown-42.jsonl"}},
                    },
                }
            ),
        ],
    ) -> RevisionInfo:
        return service.revise(run, change)

    @app.delete(
        "/v1/runs/{run}/mixture/revisions/{number}",
        summary="Take back a revision, and all after it, before production reaches them",
        tags=["mixture"],
        responses=_errors(404, 415, 416, 422, 503),
    )
    def drop_revisions(run: RunName, number: Annotated[int, Path(ge=1, le=MAX_COUNTER)]) -> list[RevisionInfo]:
        return service.drop_revisions(run, number)


def _until(tokens: str | None) -> int | None:
    return None if tokens is None else parse_amount(tokens, "tokens")


def _may_read(access: Access, request: Request) -> bool:
    try:
        access.check(request.headers.get("authorization"), Scope.READ)
    except TokenloomError:
        return False
    return True


def _add_health_routes(app: FastAPI, service: RunService, version: str, access: Access) -> None:
    registry = create_registry(service, version=version)

    @app.get("/healthz", summary="Is the process alive?", tags=["health"], responses=_errors())
    async def healthz() -> Alive:
        # On the event loop, not in a worker thread: it answers while every worker waits for the ledger.
        return Alive(status="alive", version=version)

    @app.get("/readyz", summary="Can requests be served?", tags=["health"], responses=_errors(503))
    def readyz(request: Request) -> Ready:
        reason = service.not_ready()
        if reason is not None:
            # Whether is for everybody, why is not: it names runs, machines and files.
            raise HTTPException(503, reason if _may_read(access, request) else _UNTOLD)
        return Ready(status="ready")

    @app.get(
        "/metrics",
        summary="The figures for Prometheus",
        tags=["health"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(503)},
    )
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=None, headers={"content-type": content_type})

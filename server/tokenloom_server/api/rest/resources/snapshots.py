"""The snapshots of a run: taken, listed, and given back byte for byte."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Path
from starlette.responses import Response
from tokenloom_proto.seal import unseal

from tokenloom_server.api import audit
from tokenloom_server.api.auth import Scope
from tokenloom_server.api.rest.models import Model, RunName, SampleIndex
from tokenloom_server.api.rest.routes import AppBackend, Routes
from tokenloom_server.reports.stats import SnapshotInfo

SnapshotId = Annotated[
    str,
    Path(
        description="The id that saving the snapshot gave.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$",
    ),
]


class SnapshotRequest(Model):
    sample_index: SampleIndex | None = None
    """From the oldest journalled state up to the horizon; null or absent for the committed one."""


class SnapshotSaved(Model):
    id: str
    sample_index: int
    digest: str
    """Rolling digest of all samples before ``sample_index``."""
    total_tokens: int
    """Tokens of all samples before ``sample_index``."""


_EXAMPLES = {
    "committed": {"summary": "At the committed sample index", "value": {}},
    "earlier": {"summary": "At an earlier sample index", "value": {"sample_index": 4096}},
}


ROUTES = Routes()


@ROUTES.add(
    "POST",
    "/v1/runs/{run}/snapshots",
    Scope.CONTROL,
    errors=(409, 416, 500),
    status_code=201,
    tags=["snapshots"],
)
def save_snapshot(
    backend: AppBackend,
    run: RunName,
    request: Annotated[SnapshotRequest | None, Body(openapi_examples=_EXAMPLES)] = None,
) -> SnapshotSaved:
    """Take a snapshot and save it in the ledger."""
    served = backend.runs.get(run)
    text, snapshot_id = served.snapshots.take(request.sample_index if request else None, save=True)
    assert snapshot_id is not None, "a saved snapshot has an id"
    audit.changed(served, f"saved the snapshot {snapshot_id}")
    content = unseal(text)
    return SnapshotSaved(
        id=snapshot_id,
        sample_index=content["sample_index"],
        digest=content["digest"],
        total_tokens=content["total_tokens"],
    )


@ROUTES.add("GET", "/v1/runs/{run}/snapshots", Scope.READ, tags=["snapshots"])
def list_snapshots(backend: AppBackend, run: RunName) -> list[SnapshotInfo]:
    """The snapshots saved in the ledger."""
    return backend.runs.get(run).snapshots.list()


@ROUTES.add(
    "GET",
    "/v1/runs/{run}/snapshots/{snapshot_id}",
    Scope.READ,
    tags=["snapshots"],
    response_class=Response,
    responses={
        200: {
            "content": {"application/json": {"schema": {"type": "object"}}},
            "description": "The sealed text.",
        },
    },
)
def read_snapshot(backend: AppBackend, run: RunName, snapshot_id: SnapshotId) -> Response:
    """A saved snapshot, byte for byte.

    The sealed text itself, unchanged: its checksum covers these bytes.
    """
    return Response(
        backend.runs.get(run).snapshots.saved(snapshot_id), media_type="application/json"
    )

"""What REST takes and gives, beside the figures that ``stats`` has already."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tokenloom_server.core.state import MAX_COUNTER


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class ErrorBody(_Model):
    """Every error's body."""

    error: str = Field(examples=["NotFound"])
    """The error's stable name."""
    message: str = Field(examples=["run 'wiki' is not served here; expected one of wiki-and-code"])
    """What was found, what was expected, and what to do."""


class Alive(_Model):
    status: str = Field(examples=["alive"])
    version: str = Field(examples=["0.1.0"])


class Ready(_Model):
    status: str = Field(examples=["ready"])


class RunList(_Model):
    runs: list[str] = Field(examples=[["wiki-and-code"]])
    """Names, as in the mixture files."""
    version: str = Field(examples=["0.1.0"])
    """The server's version."""
    grpc_address: str | None = Field(examples=["127.0.0.1:50051"])
    """Where trainers connect; null where the server was not told."""


SampleIndex = Annotated[int, Field(ge=0, le=MAX_COUNTER, examples=[4096])]


class SnapshotRequest(_Model):
    sample_index: SampleIndex | None = None
    """From the oldest journalled state up to the horizon; null or absent for the committed one."""


class SnapshotSaved(_Model):
    id: str
    sample_index: int
    digest: str
    """Rolling digest of all samples before ``sample_index``."""
    total_tokens: int
    """Tokens of all samples before ``sample_index``."""


_POINTS = ("snapshot_id", "sample_index", "snapshot")


class ForkRequest(_Model):
    """Either ``parent`` or ``snapshot``."""

    parent: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A run of this server."""
    sample_index: SampleIndex | None = None
    """Where the parent stood; null or absent for what it has committed."""
    snapshot: Annotated[str, Field(min_length=1)] | None = None
    """A sealed snapshot of another run as a string: what a trainer's ``state_dict()["tokenloom"]`` holds."""


class RestoreRequest(_Model):
    """Exactly one of the first three, and at most one of the others."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [k]} for k in _POINTS]})

    snapshot_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A snapshot that was saved in the ledger."""
    sample_index: SampleIndex | None = None
    """Any sample index from the oldest journalled state up to the horizon."""
    snapshot: Annotated[str, Field(min_length=1)] | None = None
    """A sealed snapshot as a string: what a trainer's ``state_dict()["tokenloom"]`` holds. Or what an older data loader
    saved, as JSON in a string."""

    skip_samples: SampleIndex = 0
    """Samples of the order behind that point that are not delivered: a bad range after a loss spike."""
    skip_tokens: SampleIndex = 0
    """The same in tokens, rounded up to whole samples."""

    @model_validator(mode="after")
    def _exactly_one(self) -> RestoreRequest:
        given = sorted(self.model_dump(exclude_none=True, include=set(_POINTS)))
        if len(given) != 1:
            raise ValueError(
                f"exactly one of snapshot_id, sample_index and snapshot, but {' and '.join(given) or 'none'} was given"
            )
        if self.skip_samples and self.skip_tokens:
            raise ValueError("at most one of skip_samples and skip_tokens, but both were given")
        return self

"""The runs of a server, and what became of one that was added, reloaded or removed."""

from __future__ import annotations

from pydantic import Field

from tokenloom_server.config.base import Document


class BrokenRun(Document):
    """A mixture that is not served, or not as its file has it now."""

    run: str = Field(examples=["wiki"])
    """The run's name, or that of its file where this says none."""
    served: bool
    """Whether it is served nevertheless, as it was before."""
    origin: str = Field(examples=["/srv/runs/wiki.yaml"])
    """Where its mixture stands."""
    error: str = Field(examples=["ConfigError"])
    """The error's stable name."""
    message: str
    """What was found, what was expected, and what to do."""


class RunList(Document):
    """The runs of a server."""

    runs: list[str] = Field(examples=[["wiki-and-code"]])
    """Names of those that are served, as in the mixture files."""
    broken: list[BrokenRun]
    """The mixtures that are not served, or not as they stand now."""
    version: str = Field(examples=["0.1.0"])
    """The server's version."""
    grpc_address: str | None = Field(examples=["127.0.0.1:50051"])
    """Where trainers connect; null where that is not known."""


class ChangedRun(Document):
    """A run that was added, reloaded or removed."""

    run: str = Field(examples=["wiki"])
    origin: str = Field(examples=["/srv/runs/wiki.yaml"])
    """Where its mixture stands."""
    note: str
    """What came of it, or becomes of it when the server starts again; for people."""

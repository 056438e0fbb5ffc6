"""The form of all documents about a run."""

from __future__ import annotations

from pydantic import ConfigDict

from tokenloom_server.config.described import Described


class Document(Described):
    """Frozen; the docstrings of its fields are their descriptions in the REST API."""

    model_config = ConfigDict(frozen=True, extra="forbid")

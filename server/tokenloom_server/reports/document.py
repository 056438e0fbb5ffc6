"""The form of all documents about a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """Frozen; the docstrings of its fields are their descriptions in the REST API."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

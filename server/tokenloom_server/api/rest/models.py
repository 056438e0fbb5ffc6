"""What the bodies and parameters of several resources have in common."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from pydantic import ConfigDict, Field

from tokenloom_server.config.base import Described
from tokenloom_server.core.state import MAX_COUNTER


class Model(Described):
    """A body: no field more than these, none converted; its docstrings become descriptions in OpenAPI."""

    # FastAPI asks each body for its validator, and an unbuilt one takes its alias for a mistake.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=False)


class ErrorBody(Model):
    """Every error's body."""

    error: str = Field(examples=["NotFound"])
    """The error's stable name."""
    message: str = Field(examples=["run 'wiki' is not served here; expected one of wiki-and-code"])
    """What was found, what was expected, and what to do."""


#: The bounds of an index or a count.
COUNTER: dict[str, Any] = {"ge": 0, "le": MAX_COUNTER}
#: A sample index in a body.
SampleIndex = Annotated[int, Field(examples=[4096], **COUNTER)]
#: The ``{run}`` of a path.
RunName = Annotated[
    str,
    Path(
        description="The run's name, as in its mixture file.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        examples=["wiki-and-code"],
    ),
]

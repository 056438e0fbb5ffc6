"""A requested change of a mixture: the body of a PATCH, also made by the command line."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from tokenloom_server.config.base import Described, PlainText
from tokenloom_server.core.state import MAX_COUNTER

_Counter = Annotated[int, Field(ge=0, le=MAX_COUNTER, examples=[4096])]


class _ChangePart(Described):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, defer_build=False
    )  # see REST's ``Model``


class Setting(_ChangePart):
    """New values for one source or node. What is null is not given any more: an alias, a limit."""

    child: str
    """Its alias or spec; a node without an alias by its place in the mixture in force, such as
    ``mixture.children.2``."""
    weight: Any = None
    policy: str | None = None
    on_exhausted: str | None = None
    epochs: float | str | None = None
    max_tokens: int | None = None
    unit: str | None = None
    interpolate: str | None = None
    alias: str | None = None
    paused: bool | None = None
    """Whether it is to give nothing until it is set to false again."""


class Addition(_ChangePart):
    """A new child."""

    child: dict[str, Any]
    """A source or a node, as in a mixture file."""
    to: str = "mixture"
    """The node that gets it: its alias, or its place."""


class Exclusion(_ChangePart):
    """Rows to leave out from then on."""

    file: str
    """JSON lines, or CSV with a header: spec (or alias), shard, row. The path is the server's."""


class PlannedChange(_ChangePart):
    """What a revision may change that names no file of the server, and from when on."""

    sample_index: _Counter | None = None
    """From this sample on; the first that is possible if neither this nor ``total_tokens`` is given."""
    total_tokens: _Counter | None = None
    """From the first sample on before which the run has had so many tokens."""
    set: list[Setting] = Field(default_factory=list)
    drop: list[str] = Field(default_factory=list)
    """Aliases, specs or places of sources and nodes that are to leave."""


class MixtureChange(PlannedChange):
    """What a revision is to change, from when on, and why."""

    reason: Annotated[PlainText, Field(min_length=1, max_length=2000)]
    """For whoever asks later; it stays in the ledger."""
    author: Annotated[PlainText, Field(max_length=200)] = ""
    dry_run: bool = False
    """Changes nothing: the answer is the revision that this would make now."""
    add: list[Addition] = Field(default_factory=list)
    mixture: dict[str, Any] | None = None
    """A whole new root, as in a mixture file, instead of ``set``, ``add`` and ``drop``."""
    append_files: list[str] = Field(default_factory=list)
    """Sources of which files that appeared since the run began are to be read, too, after those they have."""
    exclude: Exclusion | None = None
    from_start: bool = False
    """Whether sources that come back are read from their first row, and not where they stood."""

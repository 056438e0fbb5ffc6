"""``seen``: the rows of a source that a job had read with another data loader, in the epoch that goes on here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tokenloom_server.config.base import PlainText, Section


class SeenConfig(Section):
    """A file of flags, as numpy saves them: for each row of the source, file after file, whether it was read."""

    file: Annotated[PlainText, Field(min_length=1)]
    """Its path; one that is relative counts from the mixture file's folder."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the file: another one makes another order."""

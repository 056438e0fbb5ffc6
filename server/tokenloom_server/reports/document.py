"""What documents about a run begin with."""

from __future__ import annotations

from tokenloom_server.config.base import Document


class RunDocument(Document):
    """What is said of a stream of a run."""

    run: str
    stream: str

"""Why the demonstration could not go on."""

from __future__ import annotations

from tokenloom_server.errors import TokenloomError


class DemoFailed(TokenloomError):
    """A step of the demonstration failed; the message says which, and shows the log that tells why."""

"""All errors that a dataset raises: those that a server sends, and the client's own."""

from __future__ import annotations

from tokenloom_proto import errors as _shared
from tokenloom_proto.errors import *  # noqa: F403
from tokenloom_proto.errors import TokenloomError
from tokenloom_proto.errors import named as named

__all__ = ["ServerUnavailable", *_shared.__all__]


class ServerUnavailable(TokenloomError):
    """The server could not be reached, or did not answer, within the timeout.

    Check that the server runs and that its address is right; the connection's timeouts say how long to wait.
    """

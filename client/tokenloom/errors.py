"""The errors of the client alone. Those that a server sends stand in ``tokenloom_proto.errors``."""

from __future__ import annotations

from tokenloom_proto.errors import TokenloomError


class ServerUnavailable(TokenloomError):
    """The server could not be reached, or did not answer, for as long as the timeout allows.

    Look whether the server runs and its address is right; the connection's timeouts say for how long it is waited
    for.
    """


class EndOfData(TokenloomError):
    """The data ended, and the dataset was made with ``at_end="raise"``.

    Nothing: ``reason`` says why. Without ``at_end="raise"`` the iteration stops instead.
    """

    def __init__(
        self, message: str, *, reason: str = "", sample_index: int = 0, total_tokens: int = 0
    ) -> None:
        super().__init__(message)
        self.reason = reason
        """Why they ended, in the server's words."""
        self.sample_index = sample_index
        self.total_tokens = total_tokens

"""The errors that the server raises: those of ``tokenloom_proto.errors``, which the client knows, too."""

from tokenloom_proto.errors import *  # noqa: F403

"""The errors that the server raises: those of ``tokenloom_proto.errors``, which the client knows, too; and what the
system says of a file."""

from tokenloom_proto.errors import *  # noqa: F403
from tokenloom_proto.files import reason as reason

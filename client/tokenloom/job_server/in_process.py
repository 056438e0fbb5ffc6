"""The server's part in this process, called without a socket: what ``LocalDataset`` reads from.

The one place where the client imports the server, and only when it is asked to: who trains with a server elsewhere
needs none of that installed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenloom_proto.address import Address
from tokenloom_proto.credentials import Credentials

from tokenloom.connection.server import RunServer
from tokenloom.job_server.child_process import require_server

if TYPE_CHECKING:
    import grpc


class InProcessServer(RunServer):
    """A mixture file's run within this process. It begins with the first ``connect``, so that a ``DataLoader``'s worker
    has it where the batches are read."""

    in_job = True

    def __init__(self, mixture: Path) -> None:
        """Reads the mixture file. Raises ``ConfigError``."""
        require_server(mixture)
        from tokenloom_server.api.local import LocalServer

        self._server = LocalServer(mixture)
        super().__init__(
            Address((str(mixture),), self._server.run, connect=self.connect), Credentials()
        )
        self._channel: grpc.Channel | None = None
        self._pid: int | None = None

    def connect(self) -> grpc.Channel:
        """To the run, which is brought up where it was not. Raises what is wrong with sources, tokeniser and
        mixture."""
        if (
            self._channel is None or self._pid != os.getpid()
        ):  # a forked child has none of its parent's threads
            self._channel = self._server.start()
            self._pid = os.getpid()
        return self._channel

    def close(self) -> None:
        """Ends the run's threads; bounded."""
        if self._pid == os.getpid():
            self._server.close()
        self._channel = self._pid = None

"""The server's part of a process that trains by itself: one run, its threads and its ledger, without a socket."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tokenloom_server.api.grpc.in_process_channel import InProcessChannel
from tokenloom_server.api.mixture_origin import INDEX_FOLDER, MixtureOrigin
from tokenloom_server.api.service import Runs
from tokenloom_server.catalog import environment_catalog
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import ConfigError
from tokenloom_server.ledger.open import FILE_NAME
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.run.timeouts import Timeouts

#: Nobody can go on from this ledger: what is committed only frees the window. ``close`` waits for a last one.
COMMIT_EVERY_S = 0.1


class LocalServer:
    """One mixture file, served to this process alone.

    Its ledger goes with it: where the process goes on, it does so from a trainer's state, which an empty ledger takes.
    So nothing stays on disk, and no other server of the run is in the way.
    """

    def __init__(self, mixture: Path) -> None:
        """Reads the mixture file alone, which raises ``ConfigError`` where it is missing or wrong."""
        if "TOKENLOOM_SERVE_READERS" in os.environ:
            raise ConfigError(
                "TOKENLOOM_SERVE_READERS is set, but a server within the training process has no readers: unset it, or "
                "start 'tokenloom serve --readers', and give the dataset that server's address"
            )
        self._mixture = mixture.absolute()  # the process may go elsewhere before it is started
        self._config = config.load(mixture, environment_catalog())
        self._open = ExitStack()

    @property
    def run(self) -> str:
        """The run's name."""
        return self._config.run

    def start(self) -> InProcessChannel:
        """Opens the sources and begins to produce. Raises what sources and tokeniser raise; nothing is left open
        then."""
        with ExitStack() as opened:
            folder = Path(tempfile.mkdtemp(prefix="tokenloom-"))
            try:
                ledger = SqliteLedger(folder / FILE_NAME)
                opened.callback(ledger.close)
                ledger.check()
            finally:
                # Its one connection has it open, and that is enough: nothing stays on disk, however this process ends.
                shutil.rmtree(folder, ignore_errors=True)
            ledger.forget_path()
            runs = Runs(ledger, timeouts=Timeouts(commit_every_s=COMMIT_EVERY_S))
            opened.callback(runs.stop)
            base = self._mixture.resolve().parent
            runs.add_from(
                MixtureOrigin(
                    where=str(self._mixture),
                    index_dir=base / INDEX_FOLDER,
                    mixture=self._config,
                    folder=base,
                )
            )
            self._open = opened.pop_all()
            return InProcessChannel(runs)

    def close(self) -> None:
        """Ends the run's threads, in a bounded time. Further calls do nothing."""
        self._open.close()

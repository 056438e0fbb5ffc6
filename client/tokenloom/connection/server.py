"""Where a run is served, for the datasets that share it: by the address as people write it, that of gRPC."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from tokenloom_proto.address import Address, ServerAddress, reached_at
from tokenloom_proto.credentials import NO_FILES, Credentials, TlsFiles

from tokenloom.connection.options import ConnectionOptions
from tokenloom.errors import ServerUnavailable

if TYPE_CHECKING:
    from typing_extensions import Self


class RunServer:
    """The server of a run, which runs elsewhere. One that the job started for itself is a subclass."""

    #: Whether the job itself runs it, so that it ends with the datasets that use it.
    in_job: ClassVar[bool] = False

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.address = address
        self.credentials = credentials
        self._users = 0

    def share(self) -> Self:
        """Counts one more dataset that uses it; the dataset is to ``release`` it."""
        self._users += 1
        return self

    def release(self) -> None:
        """One of its datasets is closed. The last one ends what was started for them."""
        self._users -= 1
        if not self._users:
            self.close()

    def watch(self, fail: Callable[[BaseException], None]) -> None:
        """Has ``fail`` called where the server ended for good. One that runs elsewhere may always come back."""

    def close(self) -> None:
        """Ends what this process has started. Further calls do nothing."""


def find_run(url: str, options: ConnectionOptions) -> Address:
    """The address of a run. Asks REST where that is whose address it is, or where a scheme or the run is missing.

    Raises ``ValueError`` for what is no address or leaves the run open, and what asking raises.
    """
    address = ServerAddress.parse(url)
    if address.is_grpc:
        return Address.parse(url)
    # Not at the top: most URLs are gRPC's, and to import what asks by HTTP is a twentieth of importing the client.
    from tokenloom_proto import rest

    files = TlsFiles(options.tls_ca, options.tls_cert, options.tls_key).or_of(os.environ)
    run_address = Address(address.targets, address.run, address.is_tls(files != NO_FILES))
    base = f"http{'s' * run_address.tls}://{run_address.targets[0]}"
    token = options.credentials(run_address).token
    try:
        answer = rest.get(rest.opener(base, files), base + rest.ABOUT, token, ServerUnavailable)
    except ServerUnavailable:
        if address.scheme or not address.run:
            raise
        return run_address  # gRPC's, or that of a server that is away, for which a Join waits
    about = rest.About.parse(answer, "grpc_address", base)
    run = address.run or ", ".join(about.runs)
    if run not in about.runs:
        raise ValueError(
            f"{base} serves {', '.join(about.runs) or 'no run'}; name one of these: {base}/RUN"
        )
    return Address((reached_at(about.address, run_address.targets[0]),), run, run_address.tls)

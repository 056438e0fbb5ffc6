"""``ConnectionOptions``: how a dataset reaches its server, and how long it waits for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenloom_proto.address import Address
from tokenloom_proto.credentials import PLAINTEXT_VARIABLE, Credentials, TlsFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionOptions:
    """How a dataset reaches its server. Immutable, and may be handed to another process; its ``repr`` has no secret.

    What is left out of the credentials is taken from the environment. Raises ``ValueError``, with the field's name, for
    what makes no sense.
    """

    token: str | None = field(default=None, repr=False)
    """Where the server wants one; else the environment's ``TOKENLOOM_TOKEN``, or the content of the file that
    ``TOKENLOOM_TOKEN_FILE`` names."""
    tls_ca: str | os.PathLike[str] | None = None
    """With ``grpcs://``: the file (PEM) of the CA that is trusted; else ``TOKENLOOM_TLS_CA``, else public ones."""
    tls_cert: str | os.PathLike[str] | None = None
    """For a server that asks for a certificate: the file (PEM) of the client's own; else ``TOKENLOOM_TLS_CERT``."""
    tls_key: str | os.PathLike[str] | None = None
    """The file (PEM) of that certificate's key; else ``TOKENLOOM_TLS_KEY``."""
    plaintext_hosts: Sequence[str] = ()
    """Hosts that a token may be sent to without TLS, beside this machine and those of ``TOKENLOOM_PLAINTEXT_HOSTS``."""
    prefetch_steps: int | None = None
    """Batches that are fetched ahead at most; None: as many as suit the server's messages."""
    connect_timeout_s: float = 300.0
    """How long joining may take, other ranks included."""
    reconnect_timeout_s: float = 300.0
    """How long a server that went away may stay away."""
    batch_timeout_s: float = 3600.0
    """How long ``next()`` waits for a batch."""

    def __post_init__(self) -> None:
        if self.prefetch_steps is not None:
            check_count("prefetch_steps", self.prefetch_steps)
        for name in ("connect_timeout_s", "reconnect_timeout_s", "batch_timeout_s"):
            seconds = getattr(self, name)
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{name} must be a number of seconds above 0; got {seconds!r}")
        if isinstance(self.plaintext_hosts, str):
            raise ValueError(
                f"plaintext_hosts must be a sequence of host names; got the text {self.plaintext_hosts!r}"
            )

    def credentials(self, address: Address) -> Credentials:
        """What to show the servers of an address. Raises ``ValueError`` for what is missing, is no token, or would
        send the token in the clear."""
        hosts = ",".join([*self.plaintext_hosts, os.environ.get(PLAINTEXT_VARIABLE, "")])
        return Credentials.find(
            address.hosts,
            tls=address.tls,
            token=self.token,
            files=TlsFiles(self.tls_ca, self.tls_cert, self.tls_key),
            environment=os.environ | {PLAINTEXT_VARIABLE: hosts},
        )

    def refuse_credentials(self, mixture: Path) -> None:
        """Raises ``ValueError`` for what only a server that runs elsewhere can want to see."""
        named = [
            name
            for name in ("token", "tls_ca", "tls_cert", "tls_key")
            if getattr(self, name) is not None
        ]
        if named:
            raise ValueError(
                f"connection has {', '.join(named)}, which is for the address of a server that runs, but "
                f"{str(mixture)!r} is a mixture file, whose server is started here, with a token of its own: leave it "
                "out"
            )


def check_count(name: str, value: object) -> None:
    """Raises ``ValueError`` for what is no integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")

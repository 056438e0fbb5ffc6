"""The server's certificate, its key, and the CA of its clients: checked when it starts and when they change, used by
gRPC and REST."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenloom_proto.credentials import read_pem

from tokenloom_server.api.watched_files import WatchedFiles
from tokenloom_server.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """What new connections are opened with. gRPC takes the bytes, REST the context."""

    certificate: bytes
    """The chain, PEM; the server's own certificate first."""
    key: bytes = field(repr=False)
    client_ca: bytes | None
    """Where there is one, every client must show a certificate of it."""
    context: ssl.SSLContext


class Tls(WatchedFiles[Certificates]):
    """What both endpoints need; connections that are open keep what they began with."""

    @classmethod
    def load(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> Tls | None:
        """Reads and checks the files of ``--tls-cert``, ``--tls-key`` and ``tls-client-ca``; None where none is
        given. Raises ``ConfigError`` naming the option and the file."""
        files = {"--tls-cert": cert, "--tls-key": key, "tls-client-ca": client_ca}
        named = {option: file for option, file in files.items() if file is not None}
        if not named:
            return None
        if cert is None or key is None:
            raise ConfigError(
                f"{' and '.join(named)} without the rest; TLS needs --tls-cert and --tls-key"
            )
        return cls(", ".join(named), [*named.values()], partial(_load, cert, key, client_ca))


class NewestContext(ssl.SSLContext):
    """Opens each connection with the newest certificates, for a listener that has one context all the time."""

    tls: Tls

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.tls.content.context.wrap_bio(*arguments, **options)


def _load(cert: Path, key: Path, client_ca: Path | None) -> Certificates:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    chain, secret = _read("cert", cert), _read("key", key)
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate (PEM, the server's own first) and its "
            f"key without a passphrase: {_reason(error)}"
        ) from None
    ca = None if client_ca is None else _read("client-ca", client_ca)
    if ca is not None:
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"tls-client-ca {client_ca} holds no certificate (PEM): {_reason(error)}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return Certificates(certificate=chain, key=secret, client_ca=ca, context=context)


def _read(kind: str, file: Path) -> bytes:
    try:
        return read_pem(kind, f"--tls-{kind} {file}", file)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _no_passphrase() -> str:
    # Without this, OpenSSL asks for one on the terminal, and waits.
    raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)

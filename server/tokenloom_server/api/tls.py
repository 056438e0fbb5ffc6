"""The server's certificate, its key, and the CA of its clients: checked when it starts, used by gRPC and REST."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from tokenloom_proto.credentials import read_pem

from tokenloom_server.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """What both endpoints need. gRPC takes the bytes, REST the context."""

    certificate: bytes
    """The chain, PEM; the server's own certificate first."""
    key: bytes = field(repr=False)
    client_ca: bytes | None
    """Where there is one, every client must show a certificate of it."""
    context: ssl.SSLContext

    @classmethod
    def load(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> Tls | None:
        """Reads and checks the files of ``--tls-cert``, ``--tls-key`` and ``--tls-client-ca``; None where none is
        given. Raises ``ConfigError`` naming the option and the file."""
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            options = " and ".join(
                option
                for option, file in (("--tls-cert", cert), ("--tls-key", key), ("--tls-client-ca", client_ca))
                if file is not None
            )
            raise ConfigError(f"{options} without the rest; TLS needs --tls-cert and --tls-key")
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
                raise ConfigError(f"--tls-client-ca {client_ca} holds no certificate (PEM): {_reason(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return cls(certificate=chain, key=secret, client_ca=ca, context=context)


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

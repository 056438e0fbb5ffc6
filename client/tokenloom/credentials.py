"""What a client shows a server, the token and a certificate, and whom it trusts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenloom_proto.credentials import CONTROL_VARIABLE, check_token, find_token, refuse_plaintext

TLS_CA_VARIABLE = "TOKENLOOM_TLS_CA"
TLS_CERT_VARIABLE = "TOKENLOOM_TLS_CERT"
TLS_KEY_VARIABLE = "TOKENLOOM_TLS_KEY"

_USE_TLS = "serve with --tls-cert and --tls-key, and write grpcs:// in place of grpc://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """For every connection to a run's servers. Nothing secret is in its ``repr``."""

    token: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: bytes | None = field(default=None, repr=False)
    """PEM; None for those that gRPC comes with."""
    certificate: bytes | None = field(default=None, repr=False)
    """The client's own chain, PEM, where the server wants one (mTLS)."""
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def find(
        cls,
        hosts: Iterable[str],
        *,
        tls: bool,
        token: str | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str],
    ) -> Credentials:
        """What is given, else what the environment names: ``TOKENLOOM_TOKEN`` (or ``TOKENLOOM_TOKEN_FILE``),
        ``TOKENLOOM_TLS_CA``, ``TOKENLOOM_TLS_CERT`` and ``TOKENLOOM_TLS_KEY``.

        Raises ``ValueError`` for what is missing or no token, and where the token would travel without TLS to another
        machine that ``TOKENLOOM_PLAINTEXT_HOSTS`` does not name.
        """
        token = find_token(CONTROL_VARIABLE, environment) if token is None else check_token(token, "token")
        if not tls:
            if tls_ca is not None or tls_cert is not None or tls_key is not None:
                raise ValueError("tls_ca, tls_cert and tls_key are for grpcs://, but the address begins with grpc://")
            if token is not None:
                for host in hosts:
                    refuse_plaintext(host, environment, _USE_TLS)
            return cls(token=token)
        ca = _read("tls_ca", tls_ca, TLS_CA_VARIABLE, environment)
        certificate = _read("tls_cert", tls_cert, TLS_CERT_VARIABLE, environment)
        key = _read("tls_key", tls_key, TLS_KEY_VARIABLE, environment)
        if (certificate is None) != (key is None):
            raise ValueError(
                f"tls_cert ({TLS_CERT_VARIABLE}) and tls_key ({TLS_KEY_VARIABLE}) belong together; one is missing"
            )
        return cls(token=token, tls=True, ca=ca, certificate=certificate, key=key)


def _read(
    name: str, given: str | os.PathLike[str] | None, variable: str, environment: Mapping[str, str]
) -> bytes | None:
    file = environment.get(variable) if given is None else given
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        where = variable if given is None else name
        raise ValueError(f"{where}: {str(file)!r} cannot be read ({error.strerror or error})") from None

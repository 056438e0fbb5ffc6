"""What a client shows a server, the token and a certificate, and where it refuses to; and how both read a token.

A text that is no token is never quoted in an error: it may be one with a slip of the pen in it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from tokenloom_proto.files import MOST_BYTES, open_file, reason

# When a certificate ends: of what a TLS handshake checks, what is said before one fails.


_FIRST = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
#: ``Validity`` in DER (RFC 5280, section 4.1.2.5): two times, each with two digits of its year (UTCTime) or with four.
_VALIDITY = re.compile(rb"(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z")


def refuse_expired(name: str, pem: str) -> None:
    """Raises ``ValueError``, which begins with ``name``, where the first certificate of a chain has expired."""
    first = _FIRST.search(pem)
    validity = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(first[0])) if first else None
    if validity is None:
        return
    short, long = validity.groups()
    # Two digits of a year are of 1950 to 2049.
    text = (long or (b"19" if short >= b"50" else b"20") + short).decode()
    end = datetime.strptime(f"{text}+0000", "%Y%m%d%H%M%S%z")
    if end <= datetime.now(timezone.utc):
        raise ValueError(
            f"{name} has a certificate that expired at {end:%Y-%m-%d %H:%M:%S} UTC: renew it"
        )


#: The variables that hold a token; the same name with ``_FILE`` at its end is the variable that names a file with one.
CONTROL_VARIABLE = "TOKENLOOM_TOKEN"
READ_VARIABLE = "TOKENLOOM_READ_TOKEN"
#: Hosts, separated by commas, to which a token may be sent without TLS.
PLAINTEXT_VARIABLE = "TOKENLOOM_PLAINTEXT_HOSTS"

#: The variables that name the ``TlsFiles``.
_TLS_VARIABLES = {
    "ca": "TOKENLOOM_TLS_CA",
    "cert": "TOKENLOOM_TLS_CERT",
    "key": "TOKENLOOM_TLS_KEY",
}
_USE_TLS = "serve with --tls-cert and --tls-key, and write grpcs:// in place of grpc://"

#: Nobody guesses that many characters, and no header has room for a token that is longer than the other bound.
MIN_CHARACTERS, MAX_CHARACTERS = 16, 1024

#: What may follow ``Bearer`` (RFC 6750, section 2.1).
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

#: The permission bits of everybody but the file's owner.
_OTHERS = 0o077


def find_token(
    variable: str, environment: Mapping[str, str], file: Path | None = None
) -> str | None:
    """The token of ``file``, of the environment's ``variable``, or of the file that ``variable_FILE`` names.

    None where there is none of these. An empty ``TOKENLOOM_READ_TOKEN`` is none, and so is an empty
    ``TOKENLOOM_TOKEN`` beside ``file``. Raises ``ValueError`` where there are two, or one that is no token.
    """
    text = environment.get(variable)
    if not text and (variable == READ_VARIABLE or file is not None):
        # As a file of settings says that nobody only reads; an empty control token would open everything by a slip.
        text = None
    named = environment.get(f"{variable}_FILE")
    if file is None and named is not None:
        file = Path(named)
    if text is not None and file is not None:
        raise ValueError(
            f"there are two tokens, one in {variable} and one in the file {str(file)!r}; keep one of them"
        )
    if file is not None:
        return read_token(file)
    return None if text is None else check_token(text, variable)


def is_given(environment: Mapping[str, str]) -> bool:
    """Whether the environment has a token, or names a file for one."""
    names = (CONTROL_VARIABLE, READ_VARIABLE)
    return any(environment.get(name) or environment.get(f"{name}_FILE") for name in names)


def read_token(file: Path) -> str:
    """The token in a file that only its owner may read. Raises ``ValueError`` naming the file."""
    name = f"the token file {str(file)!r}"
    return check_token(
        read_secret(name, file, 2 * MAX_CHARACTERS).decode("utf-8", "replace").strip(), name
    )


def read_secret(name: str, file: Path, size: int = MOST_BYTES, *, private: bool = True) -> bytes:
    """A file of at most ``size`` bytes that, where it is ``private``, only its owner may read. Raises ``ValueError``,
    which begins with ``name``."""
    try:
        with open_file(file, size) as opened:
            status = os.fstat(opened.fileno())
            content = opened.readall()
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({reason(error, private=private)})") from None
    mode = status.st_mode & 0o777
    # A Secret of Kubernetes is root's, and its pod reads it as a group.
    allowed = 0o040 if status.st_uid == 0 != os.geteuid() else 0
    if private and mode & _OTHERS & ~allowed:
        raise ValueError(
            f"{name} has mode {mode:04o}, so others than its owner may use it; expected 0600: chmod 600 {file}, and "
            "replace the secret if somebody may have read it"
        )
    return content


def check_token(token: str, where: str) -> str:
    """The token itself. Raises ``ValueError`` naming ``where`` it is from."""
    if not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS or not _TOKEN.fullmatch(token):
        content = f"{len(token)} characters" if token else "nothing"
        raise ValueError(
            f"{where} holds {content}; expected a token of {MIN_CHARACTERS} to {MAX_CHARACTERS} letters, digits and "
            "-._~+/ (make one: openssl rand -hex 32)"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether a host, an IPv6 one with or without brackets, is this machine alone. No name is looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def may_be_plain(host: str, environment: Mapping[str, str]) -> bool:
    """Whether what goes to ``host`` without TLS is read by nobody else: this machine, and who
    ``TOKENLOOM_PLAINTEXT_HOSTS`` names."""
    allowed = {name.strip().lower() for name in environment.get(PLAINTEXT_VARIABLE, "").split(",")}
    return is_loopback(host) or host.strip("[]").lower() in allowed


def refuse_plaintext(host: str, environment: Mapping[str, str], remedy: str) -> None:
    """Raises ``ValueError`` unless a token may be sent to ``host`` without TLS: to this machine, and to hosts that
    ``TOKENLOOM_PLAINTEXT_HOSTS`` names. ``remedy`` says how to use TLS."""
    if not may_be_plain(host, environment):
        raise ValueError(
            f"the token would travel to {host} unencrypted, for everybody on the way to read: {remedy}; or, on a "
            f"network that is yours alone, allow it with {PLAINTEXT_VARIABLE}={host.strip('[]')}"
        )


def authorization(token: str) -> str:
    """The value of the header ``authorization``."""
    return f"Bearer {token}"


class TlsFiles(NamedTuple):
    """Files (PEM) for TLS, as a client has them. One that is not given is what ``TOKENLOOM_TLS_CA``,
    ``TOKENLOOM_TLS_CERT`` or ``TOKENLOOM_TLS_KEY`` names, if anything."""

    ca: str | os.PathLike[str] | None = None
    """To trust."""
    cert: str | os.PathLike[str] | None = None
    """To show, with its key."""
    key: str | os.PathLike[str] | None = None

    def or_of(self, environment: Mapping[str, str]) -> TlsFiles:
        """With the environment's files in place of those that are not given."""
        return TlsFiles(
            *(
                file or environment.get(_TLS_VARIABLES[name])
                for name, file in self._asdict().items()
            )
        )


NO_FILES = TlsFiles()


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

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each gRPC call says of who asks."""
        return () if self.token is None else (("authorization", authorization(self.token)),)

    @classmethod
    def find(
        cls,
        hosts: Iterable[str],
        *,
        tls: bool,
        token: str | None = None,
        files: TlsFiles = NO_FILES,
        environment: Mapping[str, str],
    ) -> Credentials:
        """What is given, else what the environment names: ``TOKENLOOM_TOKEN`` (or ``TOKENLOOM_TOKEN_FILE``), and the
        files of TLS.

        Raises ``ValueError`` for what is missing or no token, and where the token would travel without TLS to another
        machine that ``TOKENLOOM_PLAINTEXT_HOSTS`` does not name.
        """
        token = (
            find_token(CONTROL_VARIABLE, environment)
            if token is None
            else check_token(token, "token")
        )
        if not tls:
            if files != NO_FILES:
                raise ValueError(
                    "tls_ca, tls_cert and tls_key are for grpcs://, but the address begins with grpc://"
                )
            if token is not None:
                for host in hosts:
                    refuse_plaintext(host, environment, _USE_TLS)
            return cls(token=token)
        ca, certificate, key = (
            _read(name, file, environment) for name, file in files._asdict().items()
        )
        if (certificate is None) != (key is None):
            raise ValueError(
                "tls_cert (TOKENLOOM_TLS_CERT) and tls_key (TOKENLOOM_TLS_KEY) belong together; one is missing"
            )
        return cls(token=token, tls=True, ca=ca, certificate=certificate, key=key)


def _read(
    name: str, file: str | os.PathLike[str] | None, environment: Mapping[str, str]
) -> bytes | None:
    """The content of one of the ``TlsFiles``."""
    source = f"tls_{name}" if file is not None else _TLS_VARIABLES[name]
    if file is None:
        file = environment.get(source)
    return None if file is None else read_pem(name, f"{source}: {str(file)!r}", Path(file))


def read_pem(kind: str, name: str, file: Path) -> bytes:
    """One of the ``TlsFiles``, by ``kind``: a key is for its owner alone, a certificate not expired. Raises
    ``ValueError``, which begins with ``name``."""
    content = read_secret(name, file, private=kind == "key")
    if kind == "cert":
        refuse_expired(name, content.decode("utf-8", "replace"))
    return content

"""A running server's figures, receipts and reports, read over REST."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from tokenloom_proto.credentials import (
    CONTROL_VARIABLE,
    READ_VARIABLE,
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    authorization,
    find_token,
    read_token,
    refuse_plaintext,
)

from tokenloom_server.errors import BeyondHorizon, ConfigError, Forbidden, NotFound, TokenloomError, Unauthenticated
from tokenloom_server.receipt import Receipt, RunReport
from tokenloom_server.stats import RunStats

_TIMEOUT_S = 10.0
#: The server may have to go forward to a sample index that its journal does not have, seconds.
_FORWARD_TIMEOUT_S = 900.0
_Answer = TypeVar("_Answer", bound=BaseModel)


class ServerUnreachable(TokenloomError):
    """Nothing answers at the address, or something else does."""


class Remote:
    """A server's REST interface, asked with a token and over TLS where it wants them."""

    def __init__(
        self,
        url: str,
        environment: Mapping[str, str],
        *,
        token_file: Path | None = None,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        """``url`` is what the server printed. The token is that of the file, else of the environment, the one for
        reading first. Raises ``ConfigError``, also where the token would travel unencrypted to another machine."""
        self._base = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urllib.parse.urlsplit(self._base)
        if parts.scheme not in ("http", "https"):
            raise ConfigError(
                f"{url!r}: expected the REST address that the server printed, such as http://127.0.0.1:8080"
            )
        try:
            self._token = token_to_look(environment, token_file)
            if self._token is not None and parts.scheme == "http":
                refuse_plaintext(parts.hostname or "", environment, "serve with --tls-cert and use https://")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # A proxy of the environment is for the outside world, not for the cluster.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_context(environment, tls_ca, tls_cert, tls_key)))
        self._opener = urllib.request.build_opener(*handlers)

    def stats(self, run: str | None) -> list[RunStats]:
        """The figures of one run, or of all. Raises ``ServerUnreachable``, ``NotFound``, ``Unauthenticated``."""
        names = [run] if run is not None else self.runs()
        return [self._read(RunStats, f"/v1/runs/{urllib.parse.quote(name)}/stats") for name in names]

    def runs(self) -> list[str]:
        """The names of the server's runs."""
        return [str(name) for name in json.loads(self._get("/v1/runs"))["runs"]]

    def only_run(self, run: str | None) -> str:
        """``run``, or the only one that the server has. Raises ``ConfigError`` where it has several."""
        found = [run] if run is not None else self.runs()
        if len(found) != 1:
            raise ConfigError(f"{self._base} serves {len(found)} runs: {', '.join(found) or 'none'}; name one by --run")
        return found[0]

    def receipt(self, run: str, sample_index: int | None = None) -> Receipt:
        """Which data a run had up to a sample index, None for the committed one. Also raises ``BeyondHorizon``."""
        asked = "" if sample_index is None else f"?sample_index={sample_index}"
        return self._read(Receipt, f"/v1/runs/{urllib.parse.quote(run)}/receipt{asked}", _FORWARD_TIMEOUT_S)

    def report(self, run: str) -> RunReport:
        """What a model card needs to say about a run's data."""
        return self._read(RunReport, f"/v1/runs/{urllib.parse.quote(run)}/report")

    def _read(self, kind: type[_Answer], path: str, timeout_s: float = _TIMEOUT_S) -> _Answer:
        try:
            return kind.model_validate_json(self._get(path, timeout_s))
        except ValidationError:
            raise ServerUnreachable(
                f"{self._base}: the answer is not what it should be at {path}; is it a Tokenloom server of this "
                "release?"
            ) from None

    def _get(self, path: str, timeout_s: float = _TIMEOUT_S) -> bytes:
        url = f"{self._base}{path}"
        try:
            request = urllib.request.Request(url)
            if self._token is not None:
                # Where the server sends us elsewhere, the token stays behind.
                request.add_unredirected_header("Authorization", authorization(self._token))
            with self._opener.open(request, timeout=timeout_s) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                message = str(json.loads(text)["message"])
            except (ValueError, KeyError, TypeError):
                message = text[:200]
            raise _STATUSES.get(error.code, ServerUnreachable)(f"{url}: {error.code}: {message}") from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerUnreachable(
                f"{url}: no answer ({reason}); give the REST address that `tokenloom serve` printed"
            ) from None


_STATUSES: Mapping[int, type[TokenloomError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    416: BeyondHorizon,
}


def token_to_look(environment: Mapping[str, str], file: Path | None) -> str | None:
    """The token of who only looks: of the file, else of the environment, the one for reading first.

    Raises ``ValueError`` for what is no token.
    """
    if file is not None:
        return read_token(file)
    return find_token(READ_VARIABLE, environment) or find_token(CONTROL_VARIABLE, environment)


def _context(environment: Mapping[str, str], ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    files = (ca or environment.get(TLS_CA_VARIABLE), cert or environment.get(TLS_CERT_VARIABLE))
    key_file = key or environment.get(TLS_KEY_VARIABLE)
    try:
        context = ssl.create_default_context(cafile=files[0])
        if files[1] is not None:
            context.load_cert_chain(files[1], key_file, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-ca {files[0]}, --tls-cert {files[1]} and --tls-key {key_file}: expected PEM files, the key without "
            f"a passphrase ({error})"
        ) from None
    return context


def _no_passphrase() -> str:
    # Without this, OpenSSL asks for one on the terminal, and waits.
    raise ValueError("the key has a passphrase")

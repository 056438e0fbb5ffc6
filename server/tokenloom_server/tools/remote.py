"""A running server, asked over REST: figures, traces, receipts, reports, restore, the mixture."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from tokenloom_proto.credentials import (
    CONTROL_VARIABLE,
    NO_FILES,
    READ_VARIABLE,
    TlsFiles,
    authorization,
    find_token,
    read_token,
    refuse_plaintext,
)
from tokenloom_proto.errors import named

from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.reports.receipt import Receipt, RevisionInfo, RunReport
from tokenloom_server.reports.stats import MixtureInfo, NextLaunch, RunLosses, RunStats
from tokenloom_server.reports.trace import TracedMicroStep, TracedSample

_TIMEOUT_S = 10.0
#: A new mixture's files are listed, and looked into, before the answer, seconds.
_REVISE_TIMEOUT_S = 300.0
#: What goes forward to a sample may take so long, seconds: longer than the server tries
#: (``replay.trace.MAX_FORWARD_S``).
_FORWARD_TIMEOUT_S = 900.0
#: Going forward through what a restore skips, seconds: for as much as the server allows (``MAX_SKIPPED_TOKENS``).
_RESTORE_TIMEOUT_S = 3600.0


_Answer = TypeVar("_Answer")


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
        files: TlsFiles = NO_FILES,
        control: bool = False,
    ) -> None:
        """``url`` is what the server printed. The token is that of the file, else of the environment: the one for
        reading first, or with ``control`` the one for everything. Raises ``ConfigError``, also where the token would
        travel unencrypted to another machine."""
        self._base = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urllib.parse.urlsplit(self._base)
        if parts.scheme not in ("http", "https"):
            raise ConfigError(
                f"{url!r}: expected the REST address that the server printed, such as http://127.0.0.1:8080"
            )
        try:
            if control:
                # Where there is only the one for reading, the server says that it is not enough.
                control_token = find_token(CONTROL_VARIABLE, environment, token_file)
                self._token = control_token or find_token(READ_VARIABLE, environment)
            else:
                self._token = token_to_look(environment, token_file)
            if self._token is not None and parts.scheme == "http":
                refuse_plaintext(parts.hostname or "", environment, "serve with --tls-cert and use https://")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # A proxy of the environment is for the outside world, not for the cluster.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_context(files.or_of(environment))))
        self._opener = urllib.request.build_opener(*handlers)

    def stats(self, run: str | None) -> list[RunStats]:
        """The figures of one run, or of all. Raises ``ServerUnreachable``, ``NotFound``, ``Unauthenticated``."""
        names = [run] if run is not None else self.runs()
        return [self._read(RunStats, self._get(f"{_path(name)}/stats")) for name in names]

    def losses(self, run: str) -> RunLosses:
        """The curve of the losses that trainers reported."""
        return self._read(RunLosses, self._get(f"{_path(run)}/losses"))

    def runs(self) -> list[str]:
        """The names of the server's runs."""
        return list(json.loads(self._get("/v1/runs"))["runs"])

    def only_run(self, run: str | None, remedy: str = "name one by --run") -> str:
        """``run``, or the only one that the server has. Raises ``ConfigError`` with the remedy where it has several."""
        names = [run] if run is not None else self.runs()
        if len(names) != 1:
            raise ConfigError(f"{self._base} serves {len(names)} runs: {', '.join(names) or 'none'}; {remedy}")
        return names[0]

    def trace_sample(self, run: str, index: int, **query: int | bool | str | None) -> TracedSample:
        """The documents of a sample. ``query``, as the route has it (``generation``, ``text``, …)."""
        path = f"{_path(run)}/samples/{index}{_query(query)}"
        return self._read(TracedSample, self._get(path, timeout_s=_FORWARD_TIMEOUT_S))

    def trace_micro_step(self, run: str, micro_step: int, **query: int | bool | None) -> TracedMicroStep:
        """The samples of a micro-step by rank. ``query``, as the route has it (``rank``, too)."""
        path = f"{_path(run)}/micro-steps/{micro_step}{_query(query)}"
        return self._read(TracedMicroStep, self._get(path, timeout_s=_FORWARD_TIMEOUT_S))

    def restore(self, run: str, **request: str | int | None) -> NextLaunch:
        """Pins where the next generation starts. ``request``: the body, as the route has it."""
        return self._pin(run, "restore", request)

    def cancel_restore(self, run: str) -> NextLaunch:
        """Takes back what is pinned, and returns it. Also raises ``NotFound``."""
        return self._read(NextLaunch, self._get(f"{_path(run)}/restore", b"", method="DELETE"))

    def fork(self, run: str, **request: str | int | None) -> NextLaunch:
        """Pins where a run that has not begun begins. ``request``: the body, as the route has it."""
        return self._pin(run, "fork", request)

    def _pin(self, run: str, route: str, request: Mapping[str, str | int | None]) -> NextLaunch:
        body = json.dumps({name: value for name, value in request.items() if value is not None}).encode()
        return self._read(NextLaunch, self._get(f"{_path(run)}/{route}", body, timeout_s=_RESTORE_TIMEOUT_S))

    def receipt(self, run: str, sample_index: int | None = None) -> Receipt:
        """Which data a run had up to a sample index, None for the committed one. Also raises ``BeyondHorizon``."""
        path = f"{_path(run)}/receipt{_query({'sample_index': sample_index})}"
        return self._read(Receipt, self._get(path, timeout_s=_FORWARD_TIMEOUT_S))

    def report(self, run: str) -> RunReport:
        """What a model card needs to say about a run's data."""
        return self._read(RunReport, self._get(f"{_path(run)}/report", timeout_s=_FORWARD_TIMEOUT_S))

    def mixture(self, run: str) -> MixtureInfo:
        """The mixture in force, and its revisions."""
        return self._read(MixtureInfo, self._get(f"{_path(run)}/mixture"))

    def revise(self, run: str, change: Mapping[str, Any]) -> RevisionInfo:
        """Makes a revision. ``change``: the body, as the route has it."""
        body = json.dumps(change).encode()
        answer = self._get(f"{_path(run)}/mixture", body, method="PATCH", timeout_s=_REVISE_TIMEOUT_S)
        return self._read(RevisionInfo, answer)

    def drop_revisions(self, run: str, number: int) -> list[RevisionInfo]:
        """Takes a revision and all after it back; returns them."""
        path = f"{_path(run)}/mixture/revisions/{number}"
        return self._read(list[RevisionInfo], self._get(path, b"", method="DELETE"))

    def _read(self, kind: type[_Answer], body: bytes) -> _Answer:
        try:
            return TypeAdapter(kind).validate_json(body)
        except ValidationError:
            expected = kind.__name__
            raise ServerUnreachable(
                f"{self._base}: the answer is no {expected}; is it a Tokenloom server of this release?"
            ) from None

    def _get(
        self, path: str, body: bytes | None = None, *, method: str | None = None, timeout_s: float = _TIMEOUT_S
    ) -> bytes:
        """The answer to a GET, or with a JSON ``body`` to a POST or another ``method``."""
        url = f"{self._base}{path}"
        try:
            request = urllib.request.Request(url, body, method=method)
            if body is not None:
                request.add_header("Content-Type", "application/json")
            if self._token is not None:
                # Where the server sends us elsewhere, the token does not go there.
                request.add_unredirected_header("Authorization", authorization(self._token))
            with self._opener.open(request, timeout=timeout_s) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                problem = json.loads(text)
                name, message = str(problem["error"]), str(problem["message"])
            except (ValueError, KeyError, TypeError):
                name, message = "", text[:200]
            fault = named(name, f"{url}: {error.code}: {message}")
            if type(fault) is not TokenloomError or name == TokenloomError.__name__:
                raise fault from None
            # What only HTTP has a name for: a request that is wrong, or something that is no Tokenloom server.
            kind = ConfigError if name and error.code < 500 else ServerUnreachable
            raise kind(f"{url}: {error.code}: {message}") from None
        except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if type(error) is http.client.BadStatusLine:
                reason = "what answers there does not speak HTTP/1, such as the gRPC port of a server"
            raise ServerUnreachable(
                f"{url}: no answer ({reason}); is the server running, and is this the REST address that it printed?"
            ) from None


def _path(run: str) -> str:
    return f"/v1/runs/{urllib.parse.quote(run, safe='')}"


def _query(fields: Mapping[str, int | bool | str | None]) -> str:
    """The fields that are neither None nor False, as a URL has them."""
    named = ((name, value) for name, value in fields.items() if value is not None and value is not False)
    text = urllib.parse.urlencode({name: "true" if value is True else value for name, value in named})
    return f"?{text}" if text else ""


def token_to_look(environment: Mapping[str, str], file: Path | None) -> str | None:
    """The token of who only looks: of the file, else of the environment, the one for reading first.

    Raises ``ValueError`` for what is no token.
    """
    if file is not None:
        return read_token(file)
    return find_token(READ_VARIABLE, environment) or find_token(CONTROL_VARIABLE, environment)


def _context(files: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.ca)
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-ca {files.ca}, --tls-cert {files.cert} and --tls-key {files.key}: expected PEM files, the key "
            f"without a passphrase ({error})"
        ) from None
    return context


def _no_passphrase() -> str:
    # Without this, OpenSSL asks for one on the terminal, and waits.
    raise ValueError("the key has a passphrase")

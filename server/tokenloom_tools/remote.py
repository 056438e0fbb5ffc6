"""A running server, asked over REST: figures, traces, receipts, reports, restore, the mixture."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from tokenloom_proto import rest
from tokenloom_proto.address import ServerAddress
from tokenloom_proto.credentials import (
    CONTROL_VARIABLE,
    NO_FILES,
    READ_VARIABLE,
    TlsFiles,
    find_token,
    read_token,
    refuse_plaintext,
)
from tokenloom_server.errors import ConfigError, NotFound, TokenloomError
from tokenloom_server.planning.plan import RunPlan
from tokenloom_server.reports.stats import (
    ChangedRun,
    MixtureInfo,
    NextLaunch,
    RevisionInfo,
    RunList,
    RunStats,
)

from tokenloom_tools.reports.documents import Receipt, RunReport, TracedMicroStep, TracedSample

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
        control: bool = False,
    ) -> None:
        """``url`` is what the server printed. The token is that of the file, else of the environment: the one for
        reading first, or with ``control`` the one for everything; files of TLS are the environment's. Raises
        ``ConfigError``, also where the token would travel unencrypted to another machine."""
        files = TlsFiles().or_of(environment)
        try:
            address = ServerAddress.parse(url)
            self.url = f"http{'s' * address.is_tls(files != NO_FILES)}://{address.targets[0]}"
            #: The run that the address names; empty for none.
            self.run = address.run
            if control:
                # Where there is only the one for reading, the server says that it is not enough.
                control_token = find_token(CONTROL_VARIABLE, environment, token_file)
                self._token = control_token or find_token(READ_VARIABLE, environment)
            else:
                self._token = token_to_look(environment, token_file)
            if self._token is not None and self.url.startswith("http:"):
                host = address.targets[0].rpartition(":")[0]
                refuse_plaintext(host, environment, "serve with --tls-cert and use https://")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            self._opener = rest.opener(self.url, files)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TOKENLOOM_TLS_CA {files.ca}, TOKENLOOM_TLS_CERT {files.cert} and TOKENLOOM_TLS_KEY {files.key}: "
                f"expected PEM files, the key without a passphrase ({error})"
            ) from None

    def stats(self) -> list[RunStats]:
        """The figures of the run that the address names, or of all that are still there. Raises ``ServerUnreachable``,
        ``NotFound``, ``Unauthenticated``."""
        figures = []
        for name in self._named():
            try:
                figures.append(self._ask(RunStats, f"{_path(name)}/stats"))
            except NotFound:
                if self.run:
                    raise
                # One of all was removed meanwhile.
        return figures

    def about(self) -> rest.About:
        """The runs, and where trainers connect. Raises ``ProtocolError`` where it is no Tokenloom server."""
        return rest.About.parse(self._get(rest.ABOUT), "grpc_address", self.url)

    def identity(self) -> str:
        """Which process answers. Asked without the token, which is for one server alone."""
        try:
            return str(
                json.loads(rest.get(self._opener, f"{self.url}/healthz", None, ServerUnreachable))[
                    "server"
                ]
            )
        except (ValueError, KeyError, TypeError):
            raise ServerUnreachable(
                f"{self.url}: what answers there is no Tokenloom server of this release"
            ) from None

    def check_ready(self) -> None:
        """Raises ``ServerUnreachable`` where no run can be served."""
        self._get("/readyz")

    def list_runs(self) -> RunList:
        """The runs, and the mixtures that are not served as they stand."""
        return self._ask(RunList, rest.ABOUT)

    def add_run(self, **request: str | None) -> ChangedRun:
        """Adds a run. ``request``: the body, as the route has it."""
        return self._ask(ChangedRun, rest.ABOUT, request, timeout_s=_REVISE_TIMEOUT_S)

    def reload_run(self, run: str, **request: str | None) -> ChangedRun:
        """Has the mixture file of a run read again. ``request``: the body, as the route has it."""
        return self._ask(ChangedRun, f"{_path(run)}/reload", request, timeout_s=_REVISE_TIMEOUT_S)

    def remove_run(self, run: str) -> ChangedRun:
        """Removes a run from the server; the ledger keeps it."""
        return self._ask(ChangedRun, _path(run), method="DELETE", timeout_s=_REVISE_TIMEOUT_S)

    def only_run(self, otherwise: str = "") -> str:
        """The run that the address names, else ``otherwise``, else the only one that the server has. Raises
        ``ConfigError`` where it has several."""
        names = self._named(otherwise)
        if len(names) != 1:
            raise ConfigError(
                f"{self.url} serves {len(names)} runs: {', '.join(names) or 'none'}; name one: {self.url}/RUN"
            )
        return names[0]

    def _named(self, otherwise: str = "") -> list[str]:
        named = self.run or otherwise
        return [named] if named else self.about().runs

    def trace_sample(self, run: str, index: int, **query: int | bool | str | None) -> TracedSample:
        """The documents of a sample. ``query``, as the route has it (``generation``, ``text``, …)."""
        path = f"{_path(run)}/samples/{index}{_query(query)}"
        return self._ask(TracedSample, path, timeout_s=_FORWARD_TIMEOUT_S)

    def trace_micro_step(
        self, run: str, micro_step: int, **query: int | bool | None
    ) -> TracedMicroStep:
        """The samples of a micro-step by rank. ``query``, as the route has it (``rank``, too)."""
        path = f"{_path(run)}/micro-steps/{micro_step}{_query(query)}"
        return self._ask(TracedMicroStep, path, timeout_s=_FORWARD_TIMEOUT_S)

    def restore(self, run: str, **request: str | int | None) -> NextLaunch:
        """Pins where the next generation starts. ``request``: the body, as the route has it."""
        return self._ask(NextLaunch, f"{_path(run)}/restore", request, timeout_s=_RESTORE_TIMEOUT_S)

    def cancel_restore(self, run: str) -> NextLaunch:
        """Takes back what is pinned, and returns it. Also raises ``NotFound``."""
        return self._ask(NextLaunch, f"{_path(run)}/restore", method="DELETE")

    def fork(self, run: str, **request: str | int | None) -> NextLaunch:
        """Pins where a run that has not begun begins. ``request``: the body, as the route has it."""
        return self._ask(NextLaunch, f"{_path(run)}/fork", request, timeout_s=_RESTORE_TIMEOUT_S)

    def receipt(self, run: str, sample_index: int | None = None) -> Receipt:
        """Which data a run had up to a sample index, None for the committed one. Also raises ``BeyondHorizon``."""
        path = f"{_path(run)}/receipt{_query({'sample_index': sample_index})}"
        return self._ask(Receipt, path, timeout_s=_FORWARD_TIMEOUT_S)

    def report(self, run: str) -> RunReport:
        """What a model card needs to say about a run's data."""
        return self._ask(RunReport, f"{_path(run)}/report", timeout_s=_FORWARD_TIMEOUT_S)

    def plan(self, run: str, tokens: int | None) -> RunPlan:
        """What a run will be, from where it is; up to so many tokens of it, or to the end."""
        path = f"{_path(run)}/plan{_query({'tokens': tokens})}"
        return self._ask(RunPlan, path, timeout_s=_FORWARD_TIMEOUT_S)

    def mixture(self, run: str) -> MixtureInfo:
        """The mixture in force, and its revisions."""
        return self._ask(MixtureInfo, f"{_path(run)}/mixture")

    def revise(self, run: str, change: Mapping[str, Any]) -> RevisionInfo:
        """Makes a revision. ``change``: the body, as the route has it."""
        path = f"{_path(run)}/mixture"
        return self._ask(RevisionInfo, path, change, method="PATCH", timeout_s=_REVISE_TIMEOUT_S)

    def drop_revisions(self, run: str, number: int) -> list[RevisionInfo]:
        """Takes a revision and all after it back; returns them."""
        return self._ask(
            list[RevisionInfo], f"{_path(run)}/mixture/revisions/{number}", method="DELETE"
        )

    def _ask(
        self,
        kind: type[_Answer],
        path: str,
        request: Mapping[str, Any] | None = None,
        *,
        method: str | None = None,
        timeout_s: float = rest.TIMEOUT_S,
    ) -> _Answer:
        """The answer to a GET, or with the fields of a ``request`` that are given to a POST or another ``method``."""
        fields = {name: value for name, value in (request or {}).items() if value is not None}
        body = json.dumps(fields).encode() if request is not None else b"" if method else None
        try:
            return TypeAdapter(kind).validate_json(
                self._get(path, body, method=method, timeout_s=timeout_s)
            )
        except ValidationError:
            raise ServerUnreachable(
                f"{self.url}: the answer is no {kind.__name__}; is it a Tokenloom server of this release?"
            ) from None

    def _get(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str | None = None,
        timeout_s: float = rest.TIMEOUT_S,
    ) -> bytes:
        """The answer to a GET, or with a JSON ``body`` to a POST or another ``method``."""
        return rest.get(
            self._opener,
            f"{self.url}{path}",
            self._token,
            ServerUnreachable,
            body,
            method=method,
            timeout_s=timeout_s,
        )


def _path(run: str) -> str:
    return f"/v1/runs/{urllib.parse.quote(run, safe='')}"


def _query(fields: Mapping[str, int | bool | str | None]) -> str:
    """The fields that are neither None nor False, as a URL has them."""
    named = (
        (name, value) for name, value in fields.items() if value is not None and value is not False
    )
    text = urllib.parse.urlencode(
        {name: "true" if value is True else value for name, value in named}
    )
    return f"?{text}" if text else ""


def token_to_look(environment: Mapping[str, str], file: Path | None) -> str | None:
    """The token of who only looks: of the file, else of the environment, the one for reading first.

    Raises ``ValueError`` for what is no token.
    """
    if file is not None:
        return read_token(file)
    return find_token(READ_VARIABLE, environment) or find_token(CONTROL_VARIABLE, environment)

"""Who may do what: tokens, and the scopes that routes and RPCs ask for."""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenloom_proto.credentials import CONTROL_VARIABLE, READ_VARIABLE, find_token

from tokenloom_server.api import audit
from tokenloom_server.api.tls import Tls
from tokenloom_server.api.watched_files import Watched, WatchedFiles
from tokenloom_server.core.caller import Caller
from tokenloom_server.errors import ConfigError, Forbidden, Unauthenticated

#: So many more looks a call has to end by itself once its token is not good any more: streams do with their heartbeat.
GOODBYE_LOOKS = 3


class Scope(enum.IntEnum):
    """What a call asks for; a token of a scope is good for the lower ones, too."""

    OPEN = 0
    """Nothing: health, and the page's own files, which hold no figure."""
    READ = 1
    """Looking: figures, metrics, snapshots, peeks, traces. Moves nothing."""
    TRAIN = 2
    """Being a run's trainer: joining, taking over, streaming, reporting losses."""
    CONTROL = 3
    """Steering a run: revising its mixture, pinning a restore, forking, saving a snapshot."""
    ADMIN = 4
    """The server's runs themselves: adding, reloading and removing them."""


class Needed(NamedTuple):
    """What a REST request asks of its token."""

    scope: Scope
    #: The run of the path; None where all runs are meant, and empty where none is.
    run: str | None = ""


@dataclass(frozen=True, slots=True)
class Token:
    """What a token is good for. Its text is nowhere."""

    name: str
    scope: Scope
    #: Names or patterns of the runs that it is good for.
    runs: tuple[str, ...] = ("*",)
    expires: datetime | None = None
    #: SHA-256; empty for one that is good for as long as the server runs.
    digest: bytes = b""

    def caller(self, address: str = "") -> Caller:
        return Caller(self.name, self.runs, address)


#: Who calls where no token is asked for.
_ANYBODY = Token("anybody", Scope.ADMIN)
_STRANGER = Token("a stranger", Scope.OPEN)
_CONTROL = Token("control token", Scope.ADMIN)
_READ = Token("reading token", Scope.READ)


class Access:
    """Who gets in at both endpoints: the tokens, as digests (no text of one is kept, so none can be shown), and TLS."""

    def __init__(
        self,
        control: str | None = None,
        read: str | None = None,
        tls: Tls | None = None,
        named: WatchedFiles[Mapping[bytes, Token]] | None = None,
    ) -> None:
        """``named``: tokens by their digests. No token at all: everything is open, which is for loopback. Raises
        ``ConfigError`` for a read token that is alone, or that is the control token."""
        if read is not None and control is None and named is None:
            raise ConfigError(
                f"there is a token for reading ({READ_VARIABLE}) and none for the rest, which would be open to all; "
                f"set {CONTROL_VARIABLE} or --token-file, too"
            )
        if read is not None and read == control:
            raise ConfigError(
                f"{READ_VARIABLE} and {CONTROL_VARIABLE} are the same token, so whoever reads could do everything; "
                "give each its own"
            )
        self.tls = tls
        self.named = named or WatchedFiles("", (), dict)
        self.refusals = audit.Refusals()
        self._control = _digest(control)
        self._read = _digest(read)
        #: Calls that go on: what rechecks the token of each, and how many looks found it not good any more.
        self._held: dict[Any, list[Any]] = {}

    @classmethod
    def find(
        cls,
        environment: Mapping[str, str],
        token_file: Path | None = None,
        read_token_file: Path | None = None,
        tls: Tls | None = None,
        named: WatchedFiles[Mapping[bytes, Token]] | None = None,
    ) -> Access:
        """The tokens of these files, else of the environment. Raises ``ConfigError`` naming the file or variable."""
        try:
            return cls(
                find_token(CONTROL_VARIABLE, environment, token_file),
                find_token(READ_VARIABLE, environment, read_token_file),
                tls,
                named,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def look_at_tokens(self) -> None:
        """Takes up what the file of named tokens holds now."""
        before = self._names()
        if self.named.look():
            audit.said("tokens", f"{self._names()} (before: {before})")

    def recheck_held(self, watched: Iterable[Watched] = ()) -> None:
        """Ends the calls that go on though their token is not good any more. Says what of ``watched`` is stale."""
        for each in watched:
            each.say_if_stale()
        for call, held in self._held.copy().items():
            try:
                held[0]()
            except (Unauthenticated, Forbidden):
                held[1] += 1
                if held[1] > GOODBYE_LOOKS:
                    call.cancel()

    def hold(
        self, call: Any, token: Token, needed: Scope, run: str | None = ""
    ) -> Callable[[], None]:
        """Rechecks the token of a gRPC call until that ends, and cancels it where the token is good for it no more and
        it goes on all the same: its client reads nothing. Returns what rechecks it at once."""
        recheck = partial(self.recheck, token, needed, run)
        if token.digest:
            self._held[call] = [recheck, 0]
            call.until_end.callback(self._held.pop, call)
        return recheck

    def _names(self) -> str:
        return ", ".join(token.name for token in self.named.content.values()) or "none"

    @property
    def closed(self) -> bool:
        """Whether there is a token to show."""
        return bool(self._control or self.named.files)

    def check(self, authorization: str | None, needed: Scope, run: str | None = "") -> Token:
        """Passes a call that brings what it needs, for a run or, with None, for all of them, and says what it may do.
        Raises ``Unauthenticated`` or ``Forbidden``."""
        if not self.closed:
            return _ANYBODY
        if needed is Scope.OPEN:
            return _STRANGER
        kind, _, text = (authorization or "").partition(" ")
        if kind.lower() != "bearer":
            raise Unauthenticated(
                "this server wants a token and the call brings none; set TOKENLOOM_TOKEN, or send the header "
                "Authorization: Bearer TOKEN"
            )
        token = self._token_of(text.strip())
        if token is None:
            raise Unauthenticated(
                "the token is none of this server's; ask whoever runs it for the present one, and set TOKENLOOM_TOKEN"
            )
        self.recheck(token, needed, run)
        return token

    def recheck(self, token: Token, needed: Scope, run: str | None = "") -> None:
        """Whether a token is good for what it was shown for: also of a call that goes on, while the file of tokens
        changes. Raises ``Unauthenticated`` or ``Forbidden``."""
        if token.digest:
            now = self.named.content.get(token.digest)
            if now is None:
                raise Unauthenticated(
                    f"the token {token.name!r} was revoked; ask whoever runs this server for another"
                )
            if now.expires is not None and now.expires <= datetime.now(UTC):
                raise Unauthenticated(
                    f"the token {now.name!r} expired at {now.expires}; ask for another"
                )
            token = now
        if token.scope < needed:
            raise Forbidden(
                f"the token {token.name!r} has the scope {token.scope.name.lower()!r}, and this call takes "
                f"{needed.name.lower()!r}; use one that has it, or the control token (TOKENLOOM_TOKEN of the server)"
            )
        if "*" not in token.runs and (run is None or (run and not token.caller().sees(run))):
            meant = "all runs, and this is about all" if run is None else f"run {run!r}"
            raise Forbidden(f"the token {token.name!r} is not good for {meant}; use one that is")

    def _token_of(self, text: str) -> Token | None:
        digest = _digest(text)
        # Digests of equal length, compared in constant time, and always both: the time tells nothing of a token.
        is_control = hmac.compare_digest(digest, self._control)
        is_read = hmac.compare_digest(digest, self._read)
        if is_control or is_read:
            return _CONTROL if is_control else _READ
        # Found by its digest: what the time of that may tell is of the digest of a guess, and whoever knew some bits of
        # the right one would be no nearer to a token of 256 random bits.
        return self.named.content.get(digest)


def _digest(token: str | None) -> bytes:
    return b"" if token is None else hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


#: Without a token and without TLS.
OPEN_TO_ALL = Access()

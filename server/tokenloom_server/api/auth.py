"""Who may do what: tokens, and the scopes that routes and RPCs ask for."""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from tokenloom_proto.credentials import CONTROL_VARIABLE, READ_VARIABLE, find_token

from tokenloom_server.api.tls import Tls
from tokenloom_server.errors import ConfigError, Forbidden, Unauthenticated


class Scope(enum.IntEnum):
    """What a call asks for; a token of a scope is good for the lower ones, too."""

    OPEN = 0
    """Nothing: health, and the page's own files, which hold no figure."""
    READ = 1
    """Looking: figures, metrics, snapshots, peeks, traces. Moves nothing."""
    CONTROL = 2
    """Everything: training, reporting losses, saving a snapshot, pinning a restore."""


class Access:
    """Who gets in at both endpoints: the tokens, as digests (no text of one is kept, so none can be shown), and TLS."""

    def __init__(self, control: str | None = None, read: str | None = None, tls: Tls | None = None) -> None:
        """No token: everything is open, which is for loopback. Raises ``ConfigError`` for a read token that is alone,
        or that is the control token."""
        if read is not None and control is None:
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
        self._control = _digest(control)
        self._read = _digest(read)

    @classmethod
    def find(
        cls,
        environment: Mapping[str, str],
        token_file: Path | None = None,
        read_token_file: Path | None = None,
        tls: Tls | None = None,
    ) -> Access:
        """The tokens of these files, else of the environment. Raises ``ConfigError`` naming the file or variable."""
        try:
            return cls(
                find_token(CONTROL_VARIABLE, environment, token_file),
                find_token(READ_VARIABLE, environment, read_token_file),
                tls,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def closed(self) -> bool:
        """Whether there is a token to show."""
        return bool(self._control)

    def check(self, authorization: str | None, needed: Scope) -> Scope:
        """Passes a call that brings what it needs, and says what it may do. Raises ``Unauthenticated`` or
        ``Forbidden``."""
        if not self.closed:
            return Scope.CONTROL
        if needed is Scope.OPEN:
            return needed
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer":
            raise Unauthenticated(
                "this server wants a token and the call brings none; set TOKENLOOM_TOKEN, or send the header "
                "Authorization: Bearer TOKEN"
            )
        held = self._scope_of(token.strip())
        if held is Scope.OPEN:
            raise Unauthenticated(
                "the token is none of this server's; ask whoever runs it for the present one, and set TOKENLOOM_TOKEN"
            )
        if held < needed:
            raise Forbidden(
                "the token is for reading, and this call changes something or trains; use the control token "
                "(TOKENLOOM_TOKEN of the server)"
            )
        return held

    def _scope_of(self, token: str) -> Scope:
        digest = _digest(token)
        # Digests of equal length, compared in constant time, and always both: the time tells nothing of a token.
        is_control = hmac.compare_digest(digest, self._control)
        is_read = hmac.compare_digest(digest, self._read)
        return Scope.CONTROL if is_control else Scope.READ if is_read else Scope.OPEN


def _digest(token: str | None) -> bytes:
    return b"" if token is None else hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


#: Without a token and without TLS.
OPEN_TO_ALL = Access()

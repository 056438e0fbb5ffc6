"""Every error that a server sends, in one small tree; and the one table to gRPC and HTTP statuses.

A message names what was found, what was expected and what to do. The class name is the stable name
that travels in ``tokenloom-error`` metadata and in REST bodies; a client raises the class of that name.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AttemptUsed",
    "BeyondHorizon",
    "ConfigError",
    "CounterOverflow",
    "Fenced",
    "Forbidden",
    "JoinRefused",
    "LeaseHeld",
    "LedgerError",
    "LedgerRolledBack",
    "LedgerUnavailable",
    "LedgerUnsafe",
    "LimitExceeded",
    "NotFound",
    "NotLeader",
    "OrderMismatch",
    "ProtocolError",
    "RankStalled",
    "ResumePointNeeded",
    "RunBusy",
    "ServerStopping",
    "SnapshotInvalid",
    "SourceChanged",
    "SourceError",
    "StorageError",
    "TokenizerError",
    "TokenloomError",
    "TooManyPeeks",
    "Unauthenticated",
]


class TokenloomError(Exception):
    """Root of all errors that Tokenloom raises on purpose. A kind names its statuses beside its parent, whose it has
    where it names none."""

    grpc_status: str = "INTERNAL"
    http_status: int = 500
    #: For how long, seconds, trying again makes sense; None where that is not known.
    retry_for_s: float | None = None
    #: Whether every rank of the launch gets it, so that the others need not repeat what rank 0 says.
    of_launch = False

    def __init_subclass__(cls, *, grpc: str | None = None, http: int | None = None) -> None:
        super().__init_subclass__()
        if grpc is not None:
            cls.grpc_status = grpc
        if http is not None:
            cls.http_status = http

    @property
    def name(self) -> str:
        """The error's stable name on the wire."""
        return type(self).__name__


class ConfigError(TokenloomError, grpc="INVALID_ARGUMENT", http=422):
    """A mixture file, spec or command-line value is wrong."""


class SourceError(TokenloomError, grpc="FAILED_PRECONDITION"):
    """A source's files are missing, malformed, of another shape, or not what the run began with."""


class SourceChanged(SourceError, http=409):
    """A file differs from the run's frozen manifest."""


class StorageError(SourceError, http=503):
    """A file's storage failed, or did not answer for as long as is waited: nothing is known about what is in it."""


class TokenizerError(TokenloomError, grpc="FAILED_PRECONDITION"):
    """The tokeniser is missing, unsupported, or gave an id that the vocabulary does not have."""

    def __init__(self, message: str, at: int | None = None) -> None:
        """``at``: of the rows that were to be encoded, the first that is at fault, where it is a row's."""
        super().__init__(message)
        self.at = at


class LedgerError(TokenloomError, grpc="FAILED_PRECONDITION"):
    """The ledger refused or contradicted a write."""


class LedgerUnavailable(LedgerError, grpc="UNAVAILABLE", http=503):
    """The ledger cannot be reached now; the outcome of a write under way is unknown."""


class LedgerUnsafe(LedgerError, http=503):
    """The ledger would acknowledge writes that it can lose (Redis without appendonly and fsync always, SQLite on a
    network file system).
    """


class LedgerRolledBack(LedgerError, grpc="DATA_LOSS", http=409):
    """The ledger lacks a commit or a revision that it has acknowledged: it lost data."""

    #: What to do about it, whoever finds it; a sentence without its full stop.
    remedy: ClassVar[str] = (
        "Bring its data back, or restart the training job from its last checkpoint: load_state_dict() makes the ledger "
        "right again"
    )


class NotLeader(LedgerError, grpc="UNAVAILABLE", http=503):
    """Another server has taken this run over: this one's epoch is old. Or the run is in another ledger."""


class LeaseHeld(LedgerError, grpc="UNAVAILABLE", http=503):
    """Another server serves this run, and its lease has not lapsed."""


class OrderMismatch(LedgerError, grpc="DATA_LOSS", http=409):
    """The same sample index was committed with another digest: two orders exist. Everything stops."""


class ProtocolError(TokenloomError, grpc="FAILED_PRECONDITION", http=400):
    """The peer broke the wire contract: it speaks another version, or is not a Tokenloom server. Never retried."""


class Fenced(TokenloomError, grpc="ABORTED", http=409):
    """The call belongs to a generation that is over. Never retried."""


class AttemptUsed(TokenloomError, grpc="ALREADY_EXISTS", http=409):
    """An attempt id opened a generation before, or its slot was served to another process."""


class JoinRefused(TokenloomError, grpc="FAILED_PRECONDITION", http=409):
    """Ranks disagree, or a rank does not fit its world."""


class RunBusy(TokenloomError, grpc="UNAVAILABLE", http=409):
    """Every rank of the run's present attempt was heard just now: another launch may not end it by mistake."""

    of_launch = True

    def __init__(self, message: str, retry_for_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_for_s = retry_for_s


class RankStalled(TokenloomError, grpc="DEADLINE_EXCEEDED", http=504):
    """A rank is missing, dead or does not go on, and the others have waited for it long enough."""


class ResumePointNeeded(TokenloomError, grpc="FAILED_PRECONDITION", http=409):
    """The ledger has progress and the trainer brought no state: guessing would skip or repeat data."""


class SnapshotInvalid(TokenloomError, ValueError, grpc="INVALID_ARGUMENT", http=422):
    """A snapshot is torn, of another version, or of another run, seed, tokeniser, data or config."""


class BeyondHorizon(TokenloomError, grpc="OUT_OF_RANGE", http=416):
    """A sample index that has not been and may not yet be produced."""


class NotFound(TokenloomError, grpc="NOT_FOUND", http=404):
    """No such run, stream or snapshot."""


class CounterOverflow(TokenloomError):
    """A counter passed 2^53 − 1, the last integer that JSON and Lua readers hold exactly."""


class ServerStopping(TokenloomError, grpc="UNAVAILABLE", http=503):
    """The server is closing in an orderly way; clients reconnect."""


class TooManyPeeks(TokenloomError, grpc="UNAVAILABLE", http=429):
    """As many peeks at a run are open as a server makes at once. Retried: others end."""


class Unauthenticated(TokenloomError, grpc="UNAUTHENTICATED", http=401):
    """The call brings no token, or one that this server does not know. Never retried."""


class Forbidden(TokenloomError, grpc="PERMISSION_DENIED", http=403):
    """The token has a lower scope than the call asks for, or is not good for its run. Never retried."""


class LimitExceeded(TokenloomError, grpc="RESOURCE_EXHAUSTED", http=409):
    """A bound of the server is reached: a message's size, or the number of streams, runs or saved snapshots."""


def named(name: str, message: str) -> TokenloomError:
    """The error that travels under ``name``; the root, with the name kept, for one of a newer server."""
    kinds = [TokenloomError]
    for kind in kinds:
        if kind.__name__ == name:
            return kind(message)
        kinds += kind.__subclasses__()
    return TokenloomError(f"{name}: {message}")

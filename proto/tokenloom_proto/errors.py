"""Every error that a server sends, in one small tree; and the one table to gRPC and HTTP statuses.

A message names what was found, what was expected and what to do. The class name is the stable name
that travels in ``tokenloom-error`` metadata and in REST bodies; a client raises the class of that name.
"""

from __future__ import annotations

from typing import ClassVar


class TokenloomError(Exception):
    """Root of all errors that Tokenloom raises on purpose."""

    grpc_status: str = "INTERNAL"
    http_status: int = 500
    #: For how long, seconds, trying again makes sense; None where that is not known.
    retry_for_s: float | None = None

    @property
    def name(self) -> str:
        """The error's stable name on the wire."""
        return type(self).__name__


class ConfigError(TokenloomError):
    """A mixture file, spec or command-line value is wrong."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 422


class SourceError(TokenloomError):
    """A source's files are missing, malformed, of another shape, or not what the run began with."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 500


class SourceChanged(SourceError):
    """A file differs from the run's frozen manifest."""

    http_status = 409


class StorageError(SourceError):
    """A file's storage failed, or did not answer for as long as is waited: nothing is known about what is in it."""

    http_status = 503


class TokenizerError(TokenloomError):
    """The tokeniser is missing, unsupported, or gave an id that the vocabulary does not have."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, message: str, at: int | None = None) -> None:
        """``at``: of the rows that were to be encoded, the first that is at fault, where it is a row's."""
        super().__init__(message)
        self.at = at


class LedgerError(TokenloomError):
    """The ledger refused or contradicted a write."""

    grpc_status = "FAILED_PRECONDITION"


class LedgerUnavailable(LedgerError):
    """The ledger cannot be reached now; the outcome of a write under way is unknown."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class LedgerUnsafe(LedgerError):
    """The ledger would acknowledge writes that it can lose (Redis without appendonly and fsync always, SQLite on a
    network file system).
    """

    http_status = 503


class LedgerRolledBack(LedgerError):
    """The ledger lacks a commit that it has acknowledged: it lost data."""

    #: What to do about it, whoever finds it; a sentence without its full stop.
    remedy: ClassVar[str] = (
        "Bring its data back, or restart the training job from its last checkpoint: load_state_dict() makes the ledger "
        "right again"
    )

    grpc_status = "DATA_LOSS"
    http_status = 409


class NotLeader(LedgerError):
    """Another server has taken this run over: this one's epoch is old."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class LeaseHeld(LedgerError):
    """Another server serves this run, and its lease has not lapsed."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class OrderMismatch(LedgerError):
    """The same sample index was committed with another digest: two orders exist. Everything stops."""

    grpc_status = "DATA_LOSS"
    http_status = 409


class ProtocolError(TokenloomError):
    """The peer broke the wire contract: it speaks another version, or is not a Tokenloom server. Never retried."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 400


class Fenced(TokenloomError):
    """The call belongs to a generation that is over. Never retried."""

    grpc_status = "ABORTED"
    http_status = 409


class AttemptUsed(TokenloomError):
    """An attempt id opened a generation before, or its slot was served to another process."""

    grpc_status = "ALREADY_EXISTS"
    http_status = 409


class JoinRefused(TokenloomError):
    """Ranks disagree, or a rank does not fit its world."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class RunBusy(TokenloomError):
    """Every rank of the run's present attempt was heard just now: another launch may not end it by mistake."""

    grpc_status = "UNAVAILABLE"
    http_status = 409

    def __init__(self, message: str, retry_for_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_for_s = retry_for_s


class RankStalled(TokenloomError):
    """A rank is missing, dead or does not go on, and the others have waited for it long enough."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class ResumePointNeeded(TokenloomError):
    """The ledger has progress and the trainer brought no state: guessing would skip or repeat data."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class SnapshotInvalid(TokenloomError, ValueError):
    """A snapshot is torn, of another version, or of another run, seed, tokeniser, data or config."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 422


class BeyondHorizon(TokenloomError):
    """A sample index that has not been and may not yet be produced."""

    grpc_status = "OUT_OF_RANGE"
    http_status = 416


class NotFound(TokenloomError):
    """No such run, stream or snapshot."""

    grpc_status = "NOT_FOUND"
    http_status = 404


class CounterOverflow(TokenloomError):
    """A counter passed 2^53 − 1, the last integer that JSON and Lua readers hold exactly."""


class ServerStopping(TokenloomError):
    """The server is closing in an orderly way; clients reconnect."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class TooManyPeeks(TokenloomError):
    """As many peeks at a run are open as a server makes at once. Retried: others end."""

    grpc_status = "UNAVAILABLE"
    http_status = 429


class Unauthenticated(TokenloomError):
    """The call brings no token, or one that this server does not know. Never retried."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class Forbidden(TokenloomError):
    """The token is for reading, and the call needs the one for control. Never retried."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class LimitExceeded(TokenloomError):
    """A bound of the server is reached: a message's size, or the number of streams, runs or saved snapshots."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 409


def named(name: str, message: str) -> TokenloomError:
    """The error that travels under ``name``; the root, with the name kept, for one of a newer server."""
    kinds = [TokenloomError]
    for kind in kinds:
        if kind.__name__ == name:
            return kind(message)
        kinds += kind.__subclasses__()
    return TokenloomError(f"{name}: {message}")

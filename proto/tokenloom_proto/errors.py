"""Every error that a server sends, in one small tree; and the one table to gRPC and HTTP statuses.

A message names what was found, what was expected and what to do. A docstring's second paragraph says what to do in
general (docs/errors.md). The class name is the stable name that travels in ``tokenloom-error`` metadata and in REST
bodies; a client raises the class of that name.
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
    """A mixture file, spec or command-line value is wrong.

    Correct the field that the message names; ``tokenloom validate`` checks the whole file.
    """


class SourceError(TokenloomError, grpc="FAILED_PRECONDITION"):
    """A source's files are missing, malformed, have another shape, or are not what the run began with.

    Look at the file and row that the message names; ``tokenloom validate --scan`` checks every row.
    """


class SourceChanged(SourceError, http=409):
    """A file differs from the run's frozen manifest.

    Restore the file, or begin a new run with the files as they are; see docs/guarantees.md#changed-files.
    """


class StorageError(SourceError, http=503):
    """A file's storage failed, or did not answer in time, so its content is unknown.

    Check the storage, its address and its credentials, then start the server again.
    """


class TokenizerError(TokenloomError, grpc="FAILED_PRECONDITION"):
    """The tokeniser is missing or unsupported, or gave an id outside the vocabulary.

    Restore the tokeniser that the message names, or correct ``tokenizer`` in the mixture file.
    """

    def __init__(self, message: str, at: int | None = None) -> None:
        """``at``: of the rows that were to be encoded, the first that is at fault, where it is a row's."""
        super().__init__(message)
        self.at = at


class LedgerError(TokenloomError, grpc="FAILED_PRECONDITION"):
    """The ledger refused or contradicted a write.

    Read what the message says about the ledger; ``tokenloom ledger check`` checks all of it.
    """


class LedgerUnavailable(LedgerError, grpc="UNAVAILABLE", http=503):
    """The ledger cannot be reached now; whether the current write succeeded is unknown.

    Bring the ledger back: server and clients wait for it, and continue by themselves.
    """


class LedgerUnsafe(LedgerError, http=503):
    """The ledger would acknowledge writes that it can lose (Redis without appendonly and fsync always, SQLite on a
    network file system).

    Change the setting that the message names; or give ``--ledger`` a place that keeps what it acknowledges.
    """


class LedgerRolledBack(LedgerError, grpc="DATA_LOSS", http=409):
    """The ledger lost data: it lacks a commit or a revision that it had acknowledged.

    Bring its data back, or restart the training job from its last checkpoint; see docs/operations.md.
    """

    #: What to do about it, whoever finds it; a sentence without its full stop.
    remedy: ClassVar[str] = (
        "Bring its data back, or restart the training job from its last checkpoint: load_state_dict() makes the ledger "
        "right again"
    )


class NotLeader(LedgerError, grpc="UNAVAILABLE", http=503):
    """Another server has taken over this run, or the run is in another ledger.

    Do nothing if the address names all servers: the client finds the leader. Otherwise give it the leader's address.
    """


class LeaseHeld(LedgerError, grpc="UNAVAILABLE", http=503):
    """Another server serves this run, and its lease has not lapsed.

    Stop the other server, or start this one with ``--standby``: it takes over when the lease lapses.
    """


class OrderMismatch(LedgerError, grpc="DATA_LOSS", http=409):
    """The same sample index was committed with another digest: two orders exist. Everything stops.

    Find out which server, files or package differ, then resume from a checkpoint.
    """


class ProtocolError(TokenloomError, grpc="FAILED_PRECONDITION", http=400):
    """The peer broke the wire contract: it speaks another version, or is not a Tokenloom server. Never retried.

    Install the same release on both sides, and check that the address is the server's.
    """


class Fenced(TokenloomError, grpc="ABORTED", http=409):
    """The call belongs to a generation that is over. Never retried.

    Do nothing: a newer launch has the run. End this process if it does not end by itself.
    """


class AttemptUsed(TokenloomError, grpc="ALREADY_EXISTS", http=409):
    """The attempt id opened an earlier generation, or its slot was served to another process.

    Give each launch an ``attempt`` of its own, the same on all its ranks. So must processes that a script restarts
    within a SLURM job step.
    """

    #: What to do about it.
    remedy: ClassVar[str] = (
        "An attempt id is used once: start each launch, restarts included, with LaunchOptions(attempt=…) of its own, "
        "the same on all ranks. Processes that are started again within a SLURM job step have the id of those before: "
        "give it there"
    )


class JoinRefused(TokenloomError, grpc="FAILED_PRECONDITION", http=409):
    """Ranks disagree, or a rank does not fit its world.

    Give all ranks the same arguments and state; the message names the ranks and what differs.
    """


class RunBusy(TokenloomError, grpc="UNAVAILABLE", http=409):
    """Every rank of the run's present attempt was heard just now, so another launch may not end it by mistake.

    End the other launch, or wait until its ranks are silent; ``takeover=True`` ends it on purpose.
    """

    of_launch = True

    def __init__(self, message: str, retry_for_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_for_s = retry_for_s


class RankStalled(TokenloomError, grpc="DEADLINE_EXCEEDED", http=504):
    """A rank is missing, dead or makes no progress, and the others have waited long enough.

    Read the log of the rank that the message names, then start the launch again from its checkpoint.
    """


class ResumePointNeeded(TokenloomError, grpc="FAILED_PRECONDITION", http=409):
    """The ledger has progress, but the trainer brought no state: guessing would skip or repeat data.

    Load the checkpoint, or choose ``resume="latest"`` or ``"fresh"`` on purpose; see docs/checkpoints.md.
    """


class SnapshotInvalid(TokenloomError, ValueError, grpc="INVALID_ARGUMENT", http=422):
    """A snapshot is torn, has another version, or is of another run, seed, tokeniser, data or config.

    Use a whole checkpoint of this run; ``tokenloom checkpoint`` shows what a file holds.
    """


class BeyondHorizon(TokenloomError, grpc="OUT_OF_RANGE", http=416):
    """A sample index that has not been produced, and may not be yet.

    Ask for a sample that the run has reached.
    """


class NotFound(TokenloomError, grpc="NOT_FOUND", http=404):
    """No such run, stream or snapshot.

    Check the name in the address; ``tokenloom runs`` lists the server's runs.
    """


class CounterOverflow(TokenloomError):
    """A counter passed 2^53 − 1, the last integer that JSON and Lua readers hold exactly.

    Report it: no run should be that long.
    """


class ServerStopping(TokenloomError, grpc="UNAVAILABLE", http=503):
    """The server is shutting down in an orderly way.

    Do nothing: the client waits until a server is back.
    """


class TooManyPeeks(TokenloomError, grpc="UNAVAILABLE", http=429):
    """A run has as many open peeks as the server allows. Retried, since others end.

    Do nothing: the client tries again. End peeks that nobody reads.
    """


class Unauthenticated(TokenloomError, grpc="UNAUTHENTICATED", http=401):
    """The call brings no token, or one that this server does not know. Never retried.

    Set ``TOKENLOOM_TOKEN`` to a token that the server knows; see docs/access.md.
    """


class Forbidden(TokenloomError, grpc="PERMISSION_DENIED", http=403):
    """The token's scope is too low for the call, or the token is not valid for its run. Never retried.

    Use a token whose scope and runs cover the call; see docs/access.md.
    """


class LimitExceeded(TokenloomError, grpc="RESOURCE_EXHAUSTED", http=409):
    """A bound of the server is reached: a message's size, or the number of streams, runs or saved snapshots.

    Remove what is no longer needed, or ask for less; the bounds are in docs/limits.md.
    """


def named(name: str, message: str) -> TokenloomError:
    """The error that travels under ``name``; the root, with the name kept, for one of a newer server."""
    kinds = [TokenloomError]
    for kind in kinds:
        if kind.__name__ == name:
            return kind(message)
        kinds += kind.__subclasses__()
    return TokenloomError(f"{name}: {message}")

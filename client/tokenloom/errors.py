"""Every error that a trainer can meet, in one small tree.

A class carries the name that the server sends in ``tokenloom-error`` metadata; its message is the
server's own text: what was found, what was expected and what to do.
"""

from __future__ import annotations


class TokenloomError(Exception):
    """Root of all errors that Tokenloom raises on purpose."""


class ServerUnavailable(TokenloomError):
    """The server could not be reached, or did not answer, for as long as the timeout allows."""


class ProtocolError(TokenloomError):
    """The peer broke the wire contract: it is another version, or not a Tokenloom server."""


class ConfigError(TokenloomError):
    """The run's mixture file is wrong."""


class SourceError(TokenloomError):
    """A source's files are missing, malformed, of another shape, or not what the run began with."""


class SourceChanged(SourceError):
    """A file differs from the run's frozen manifest."""


class StorageError(SourceError):
    """A file's storage failed, or did not answer for as long as the server waits."""


class TokenizerError(TokenloomError):
    """The tokeniser is missing, unsupported, or gave an id that the vocabulary does not have."""


class LedgerError(TokenloomError):
    """The ledger refused or contradicted a write."""


class LedgerUnavailable(LedgerError):
    """The ledger could not be reached."""


class LedgerUnsafe(LedgerError):
    """The ledger would acknowledge writes that it can lose."""


class LedgerRolledBack(LedgerError):
    """The ledger is behind a commit that this client was told of: it lost data."""


class NotLeader(LedgerError):
    """Another server has taken this run over."""


class LeaseHeld(LedgerError):
    """Another server serves this run, and its lease has not lapsed."""


class OrderMismatch(LedgerError):
    """The same sample index was committed with another digest: two orders exist."""


class EndOfData(TokenloomError):
    """The data ended, and the dataset was made with ``at_end="raise"``. No server sends it."""

    def __init__(self, message: str, *, reason: str = "", sample_index: int = 0, total_tokens: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        """Why they ended, in the server's words."""
        self.sample_index = sample_index
        self.total_tokens = total_tokens


class Fenced(TokenloomError):
    """A newer attempt has opened this run: this one is over, and what it had buffered is dropped."""


class AttemptUsed(TokenloomError):
    """The attempt id opened a generation before, or this slot was served to another process."""


class JoinRefused(TokenloomError):
    """Ranks disagree, or a rank does not fit its world."""


class RunBusy(TokenloomError):
    """Another attempt trains on this run: every rank of it was heard just now. ``takeover=True`` ends it on purpose."""


class RankStalled(TokenloomError):
    """A rank is missing, dead or does not go on, and this one has waited for it long enough."""


class ResumePointNeeded(TokenloomError):
    """The ledger has progress and this trainer brought no state: guessing would skip or repeat data."""


class SnapshotInvalid(TokenloomError, ValueError):
    """A state is torn, of another version, or of another run, seed, tokeniser, data or config."""


class BeyondHorizon(TokenloomError):
    """A sample index that has not been and may not yet be produced."""


class NotFound(TokenloomError):
    """No such run, stream or snapshot."""


class CounterOverflow(TokenloomError):
    """A counter passed 2^53 − 1, the last integer that JSON and Lua readers hold exactly."""


class ServerStopping(TokenloomError):
    """The server is closing in an orderly way."""


class TooManyPeeks(TokenloomError):
    """As many peeks at the run are open as the server makes at once."""


class Unauthenticated(TokenloomError):
    """The server wants a token, and this client brought none or another one."""


class Forbidden(TokenloomError):
    """The token is for reading, and training needs the one for control."""


class LimitExceeded(TokenloomError):
    """A bound of the server is reached: a message's size, or the number of streams, runs or saved snapshots."""


def named(name: str, message: str) -> TokenloomError:
    """The error that travels under ``name``; the root, with the name kept, for one of a newer server."""
    for error in _tree(TokenloomError):
        if error.__name__ == name:
            return error(message)
    return TokenloomError(f"{name}: {message}")


def _tree(root: type[TokenloomError]) -> list[type[TokenloomError]]:
    return [root, *(error for child in root.__subclasses__() for error in _tree(child))]

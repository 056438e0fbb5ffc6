"""Tokenloom's client: a run's batches on every rank, and a learning-rate schedule by its tokens.

Importing this package starts nothing and contacts nobody.
"""

from __future__ import annotations

from tokenloom.batch import Batch
from tokenloom.connection import Source
from tokenloom.dataset import RemoteDataset
from tokenloom.errors import (
    AttemptUsed,
    BeyondHorizon,
    ConfigError,
    CounterOverflow,
    EndOfData,
    Fenced,
    Forbidden,
    JoinRefused,
    LeaseHeld,
    LedgerError,
    LedgerRolledBack,
    LedgerUnavailable,
    LedgerUnsafe,
    LimitExceeded,
    NotFound,
    NotLeader,
    OrderMismatch,
    ProtocolError,
    RankStalled,
    ResumePointNeeded,
    RunBusy,
    ServerStopping,
    ServerUnavailable,
    SnapshotInvalid,
    SourceChanged,
    SourceError,
    StorageError,
    TokenizerError,
    TokenloomError,
    TooManyPeeks,
    Unauthenticated,
)
from tokenloom.lr_scheduler import TokenLRScheduler
from tokenloom.source_loss import MeanLosses, SourceLoss
from tokenloom.token_budget import TokenBudget
from tokenloom.token_losses import token_losses
from tokenloom.token_progress import TokenProgress

__all__ = [
    "AttemptUsed",
    "Batch",
    "BeyondHorizon",
    "ConfigError",
    "CounterOverflow",
    "EndOfData",
    "Fenced",
    "Forbidden",
    "JoinRefused",
    "LeaseHeld",
    "LedgerError",
    "LedgerRolledBack",
    "LedgerUnavailable",
    "LedgerUnsafe",
    "LimitExceeded",
    "MeanLosses",
    "NotFound",
    "NotLeader",
    "OrderMismatch",
    "ProtocolError",
    "RankStalled",
    "RemoteDataset",
    "ResumePointNeeded",
    "RunBusy",
    "ServerStopping",
    "ServerUnavailable",
    "SnapshotInvalid",
    "Source",
    "SourceChanged",
    "SourceError",
    "SourceLoss",
    "StorageError",
    "TokenBudget",
    "TokenLRScheduler",
    "TokenProgress",
    "TokenizerError",
    "TokenloomError",
    "TooManyPeeks",
    "Unauthenticated",
    "token_losses",
]

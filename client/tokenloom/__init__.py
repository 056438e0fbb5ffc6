"""Tokenloom's client: a run's batches on every rank, and a learning-rate schedule by its tokens.

Importing this package starts nothing and contacts nobody.
"""

from __future__ import annotations

from tokenloom_proto.errors import (
    AttemptUsed,
    BeyondHorizon,
    ConfigError,
    CounterOverflow,
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
    SnapshotInvalid,
    SourceChanged,
    SourceError,
    StorageError,
    TokenizerError,
    TokenloomError,
    TooManyPeeks,
    Unauthenticated,
)

from tokenloom.batch.layout import Batch
from tokenloom.clock.lr_scheduler import TokenLRScheduler
from tokenloom.clock.token_budget import TokenBudget
from tokenloom.clock.token_progress import TokenProgress
from tokenloom.connection.join import Source
from tokenloom.connection.options import ConnectionOptions
from tokenloom.datasets.evaluation import EvaluationDataset
from tokenloom.datasets.local import LocalDataset
from tokenloom.datasets.peek import PeekDataset
from tokenloom.datasets.remote import RemoteDataset
from tokenloom.errors import EndOfData, ServerUnavailable
from tokenloom.losses.source_loss import MeanLosses, SourceLoss
from tokenloom.losses.token_losses import token_losses

__all__ = [
    "AttemptUsed",
    "Batch",
    "BeyondHorizon",
    "ConfigError",
    "ConnectionOptions",
    "CounterOverflow",
    "EndOfData",
    "EvaluationDataset",
    "Fenced",
    "Forbidden",
    "JoinRefused",
    "LeaseHeld",
    "LedgerError",
    "LedgerRolledBack",
    "LedgerUnavailable",
    "LedgerUnsafe",
    "LimitExceeded",
    "LocalDataset",
    "MeanLosses",
    "NotFound",
    "NotLeader",
    "OrderMismatch",
    "PeekDataset",
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

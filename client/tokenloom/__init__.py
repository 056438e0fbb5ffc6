"""Tokenloom's client: a run's batches on every rank, and a learning-rate schedule by its tokens.

Importing this package starts nothing and contacts nobody.
"""

from __future__ import annotations

from tokenloom_proto import errors as _shared_errors
from tokenloom_proto.errors import *  # noqa: F403

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
    "Batch",
    "ConnectionOptions",
    "EndOfData",
    "EvaluationDataset",
    "LocalDataset",
    "MeanLosses",
    "PeekDataset",
    "RemoteDataset",
    "ServerUnavailable",
    "Source",
    "SourceLoss",
    "TokenBudget",
    "TokenLRScheduler",
    "TokenProgress",
    "token_losses",
    *_shared_errors.__all__,
]

"""Tokenloom's client: a run's batches on every rank, and a learning-rate schedule by its tokens.

Importing this package starts nothing, contacts nobody, and does not import torch: the names that need it do, when they
are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenloom_proto.versions import own_release as _own_release

from tokenloom import errors as _errors
from tokenloom.batch.layout import Batch, NumpyBatch
from tokenloom.clock.tokens import TokenBudget, TokenProgress
from tokenloom.connection.join import Source
from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.topology import LaunchOptions
from tokenloom.datasets.arrays import NumpyDataset
from tokenloom.errors import *  # noqa: F403

if TYPE_CHECKING:
    __version__: str
    from tokenloom.clock.lr_scheduler import TokenLRScheduler
    from tokenloom.datasets.training import (
        EvaluationDataset,
        LocalDataset,
        PeekDataset,
        RemoteDataset,
    )
    from tokenloom.losses import MeanLosses, SourceLoss, mean_loss, token_losses

__all__ = [
    "Batch",
    "ConnectionOptions",
    "EvaluationDataset",
    "LaunchOptions",
    "LocalDataset",
    "MeanLosses",
    "NumpyBatch",
    "NumpyDataset",
    "PeekDataset",
    "RemoteDataset",
    "Source",
    "SourceLoss",
    "TokenBudget",
    "TokenLRScheduler",
    "TokenProgress",
    "mean_loss",
    "token_losses",
    *_errors.__all__,
]

#: The names that need torch, and the modules that have them.
_NEED_TORCH = {
    "EvaluationDataset": "tokenloom.datasets.training",
    "LocalDataset": "tokenloom.datasets.training",
    "MeanLosses": "tokenloom.losses",
    "PeekDataset": "tokenloom.datasets.training",
    "RemoteDataset": "tokenloom.datasets.training",
    "SourceLoss": "tokenloom.losses",
    "TokenLRScheduler": "tokenloom.clock.lr_scheduler",
    "mean_loss": "tokenloom.losses",
    "token_losses": "tokenloom.losses",
}

if not TYPE_CHECKING:  # which would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """The release, or a name that needs torch. Raises ``ModuleNotFoundError``, which says what to install."""
        if name == "__version__":  # looked up when it is asked for: an import reads no metadata
            return _own_release()
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(_NEED_TORCH[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"tokenloom.{name} needs torch, which is not installed: pip install 'tokenloom[torch]'. NumpyDataset "
                "gives the same batches as numpy arrays without it",
                name="torch",
            ) from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

"""Experiment trackers: a run's shares, waits, losses by source and revisions, beside the trainer's own figures.

tracker = WandbTracker(dataset, wandb.init(project="…"))      # or TensorBoardTracker, or MlflowTracker
…
if step % 50 == 0:  # on every rank, for the sake of source_loss
    tracker.log(step, source_loss.log(step=step))
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenloom.datasets.order import CommittedDataset
from tokenloom.snapshot import KEY

if TYPE_CHECKING:  # needs torch
    from tokenloom.losses import MeanLosses

#: What names of metrics may not have in one of the trackers.
_UNSAFE = re.compile(r"[^\w.-]+")


class Tracker:
    """Writes a dataset's figures to the ``target`` of rank 0; on other ranks it does nothing, and needs none. A
    subclass says how."""

    def __init__(self, dataset: CommittedDataset, target: Any = None) -> None:
        self._dataset = dataset
        self._target = target
        self._tokens: Mapping[str, int] = {}

    def log(self, step: int, losses: MeanLosses | None = None) -> dict[str, float]:
        """Writes the figures after the last batch, under the trainer's own ``step``, and returns them; ``losses`` are
        those that ``SourceLoss`` gave. Asks no server. Raises ``RuntimeError`` before the first batch."""
        if self._dataset.rank:
            return {}
        figures = self._figures(losses)
        self._write(figures, step)
        return figures

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def _figures(self, losses: MeanLosses | None) -> dict[str, float]:
        figures = dict(self._dataset.metrics())
        state = json.loads(self._dataset.state_dict()[KEY])
        # Of the last batch's samples; revisions to come stand there, too.
        revisions = state["resume_state"].get("revisions", ())
        figures["revision"] = sum(
            each["sample_index"] < state["sample_index"] for each in revisions
        )
        tokens = {spec: counts["real_tokens"] for spec, counts in state["counts"].items()}
        recent = {spec: count - self._tokens.get(spec, 0) for spec, count in tokens.items()}
        names: dict[int, str] = {}
        for source in self._dataset.sources:
            alias = _UNSAFE.sub("_", source.alias)
            names[source.id] = f"{alias}_{source.id}" if alias in names.values() else alias
        ids = {source.spec: source.id for source in self._dataset.sources}
        for name, counts in (("share", tokens), ("recent_share", recent)):
            total = sum(counts.values())
            figures |= {
                f"{name}/{names[ids[spec]]}": count / total
                for spec, count in counts.items()
                if total
            }
        self._tokens = tokens
        if losses is not None:
            figures |= {
                f"loss/{names[source_id]}": loss for source_id, (loss, _) in losses.by_id.items()
            }
        return {f"tokenloom/{name}": value for name, value in figures.items()}


class WandbTracker(Tracker):
    """Weights & Biases; ``target``: the run that ``wandb.init()`` returned."""

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        self._target.log(dict(figures), step=step)


class TensorBoardTracker(Tracker):
    """TensorBoard; ``target``: a ``SummaryWriter``."""

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._target.add_scalar(name, value, step)


class MlflowTracker(Tracker):
    """MLflow; ``target``: the run that ``mlflow.start_run()`` returned."""

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        import mlflow

        mlflow.log_metrics(dict(figures), step=step, run_id=self._target.info.run_id)

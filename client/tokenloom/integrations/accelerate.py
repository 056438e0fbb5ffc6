"""Accelerate without Trainer: the dataset as a loader that its checkpoints know.

    from tokenloom.integrations.accelerate import TokenloomLoader

    model, optimizer = accelerator.prepare(model, optimizer)
    batches = TokenloomLoader(accelerator, RemoteDataset("grpc://host:50051/run", 4))
    for batch in batches:
        with accelerator.accumulate(model):
            …

``accelerator.prepare`` is not for these batches: they are each process's own already, and it would deal them out once
more, or read them in one process only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device

from tokenloom.batch.layout import Batch
from tokenloom.datasets.training import TrainingDataset, check_accumulate, check_processes


class TokenloomLoader:
    """A dataset's batches on the accelerator's device; ``save_state`` and ``load_state`` have its state.

    Make it after the ``Accelerator``, which starts the process group, and before ``load_state``. What is saved is the
    state after the last batch taken, so ``save_state`` belongs after ``optimizer.step()`` and is refused between the
    batches of one optimiser step (``accumulate``), whose gradients no checkpoint has. A checkpoint may go on on another
    number of processes. Raises ``ValueError`` where the dataset's is not the accelerator's, or its
    ``accumulate`` another.
    """

    def __init__(self, accelerator: Accelerator, dataset: TrainingDataset) -> None:
        check_processes(dataset, accelerator.num_processes, "Accelerate runs", "the Accelerator")
        steps = accelerator.gradient_accumulation_steps
        check_accumulate(dataset, steps, "Accelerate has gradient_accumulation_steps")
        self._accelerator = accelerator
        self._dataset = dataset
        accelerator.register_for_checkpointing(self)

    def __iter__(self) -> Iterator[Batch]:
        """Goes on after the last batch taken, as the dataset does."""
        return map(
            partial(send_to_device, device=self._accelerator.device, non_blocking=True),
            self._dataset,
        )

    def state_dict(self) -> dict[str, str]:
        """The dataset's; raises ``RuntimeError`` in the midst of an optimiser step."""
        if not self._accelerator.sync_gradients:
            raise RuntimeError(
                f"save_state in the midst of an optimiser step (batch {self._accelerator.step} of steps of "
                f"{self._accelerator.gradient_accumulation_steps}): its gradients would be lost, though its samples "
                "count as trained on. Save where accelerator.sync_gradients is true"
            )
        return self._dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps a state for the first ``iter()``, which joins the run."""
        # Saved by each process for itself; those that are new would count otherwise, and wait for each other for ever.
        self._accelerator.step = 0
        self._dataset.load_state_dict(state)

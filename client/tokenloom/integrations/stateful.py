"""A ``DataLoader`` whose state is that of the batch trained on, whatever its worker has fetched ahead.

A torch ``DataLoader`` with a worker has the dataset, and with it the state, in another process, some batches ahead of
the trainer. Here each batch comes with the point after it, so the trainer's process can write the state at any batch
that it was given, with no question to the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenloom.batch.layout import Batch
from tokenloom.datasets import tensors
from tokenloom.datasets.order import OrderDataset
from tokenloom.snapshot import KEY, History, Loaded, Older, Point, Positioned


class StatefulLoader(Positioned):
    """The batches of a dataset through a ``DataLoader`` with no worker or one; a ``Stateful`` of torch.

    ``collate_fn`` is called with each batch, in the worker where there is one: to have work done there is the reason to
    use one, since batches are fetched in the background in any case. Other ``options`` are those of ``DataLoader``
    (``prefetch_factor``, ``multiprocessing_context``, ``timeout``, ``pin_memory``, ``worker_init_fn``).

    The dataset is the loader's from here on: a worker's copy of it joins the run, and the one given stays as it is.
    A second ``iter()`` goes on after the last batch yielded, with the same worker.

    Raises ``ValueError`` for options that a rank's stream cannot have.
    """

    def __init__(
        self,
        dataset: OrderDataset,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[Batch], Any] | None = None,
        **options: Any,
    ) -> None:
        if num_workers not in (0, 1):
            raise ValueError(
                f"num_workers must be 0 or 1, as a rank is one slot of the run and each worker would claim it; "
                f"got {num_workers}"
            )
        tensors.check_options(options)
        if not isinstance(dataset, OrderDataset):
            raise ValueError(
                f"a {type(dataset).__name__} has no state that a worker could be ahead of: use torch's DataLoader"
            )
        self.dataset = dataset
        self._loader: DataLoader[Any] = DataLoader(
            _Pointed(dataset, collate_fn),
            batch_size=None,
            collate_fn=tensors.unchanged,
            num_workers=num_workers,
            **options,
        )
        self._items: Iterator[Any] | None = None
        self._history: History | None = None

    def __iter__(self) -> StatefulLoader:
        """Joins the run if that was not done, and goes on after the last batch yielded."""
        if self._items is None:
            self._items = iter(self._loader)
            self._history = next(self._items)
        if self._history is not None and not self.dataset.rank:
            self._history.begin()
        return self

    def __next__(self) -> Any:
        """The next batch, as ``collate_fn`` made it; raises what the dataset's ``next()`` does."""
        if self._items is None or self._history is None:
            raise RuntimeError("call iter() on the loader first, which joins the run")
        batch, point = next(self._items)
        self._history.append(point)
        return batch

    # State

    def state_dict(self, at: int | None = None) -> dict[str, str]:
        """The state after the last batch that this loader yielded, or after that which ended at sample index ``at``.

        The dataset's own: a ``RemoteDataset`` can load it, or a loader with another number of workers.
        """
        return {KEY: self._history.text(at)} if self._history else self.dataset.state_dict(at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps a state for the first ``iter()``."""
        if self._items is not None:
            raise RuntimeError(
                "load_state_dict comes before the first iter(), which joins the run at that state; to go back, make a "
                "new dataset and a new loader"
            )
        self.dataset.load_state_dict(state)

    @property
    def _position(self) -> Point | Loaded | Older:
        return self._history.last if self._history else self.dataset._position

    def close(self) -> None:
        """Ends the worker and the stream. The state stays readable."""
        self._items = iter(())  # the worker ends with the last reference to its iterator
        self.dataset.close()


class _Pointed(IterableDataset[Any]):
    """The dataset's history as it stands, then each batch with the point after it."""

    def __init__(self, dataset: OrderDataset, collate_fn: Callable[[Batch], Any] | None) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._dataset)
        try:
            yield self._dataset.history.copy()
            for batch in batches:
                point = self._dataset.history.last
                yield (batch if self._collate_fn is None else self._collate_fn(batch)), point
        finally:
            if get_worker_info() is not None:
                self._dataset.close()  # says goodbye: the next launch need not wait for this worker

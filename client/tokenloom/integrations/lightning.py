"""Lightning: a data module whose place in the data is part of Lightning's own checkpoints.

    trainer.fit(model, datamodule=TokenloomDataModule("grpc://127.0.0.1:50051/run", batch_size=8), ckpt_path="last")

Lightning fetches a batch ahead to know when the data end, so the dataset is further than the weights. What is saved is
the state after the batch that was trained on last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion

from tokenloom.batch.layout import Batch
from tokenloom.clock.lr_scheduler import TokenLRScheduler
from tokenloom.datasets.training import EvaluationDataset, RemoteDataset, check_accumulate
from tokenloom.snapshot import KEY, Loaded, Older, Point, Positioned

#: Options that a dataset has whether it is trained or evaluated on.
_COMMON = frozenset({"rank", "world_size", "columns", "device", "connection"})


class TokenloomDataModule(Positioned, LightningDataModule):
    """The batches of a run as Lightning's training data; ``options`` are those of ``RemoteDataset``.

    The dataset is made when a fit begins, where the process group is there already, and closed when it ends. A
    checkpoint has its state under the name of this class; ``fit(ckpt_path=…)`` goes on after the last sample that the
    weights have seen, on any number of processes. A second ``fit`` without a checkpoint goes on where the first ended.

    ``accumulate`` is the Trainer's ``accumulate_grad_batches`` unless it is given, so that a batch's
    ``global_label_tokens`` are those of its optimiser step.

    ``validation`` makes it Lightning's validation data, too: the arguments of ``dataset.evaluation()`` that are not as
    in training, such as ``{"samples": 2048}`` or ``{"stream": "held", "batch_size": 16}``. The same samples come each
    time, and what is saved does not know of them.

    A checkpoint that was saved without the data's state is refused, also with ``resume="fresh"``, which is for a launch
    without a checkpoint; ``resume="latest"`` or a snapshot's id says where the data go on. To begin the data again with
    such weights, load them without ``ckpt_path``.

    Training ends with the data, whatever ``max_epochs`` says: an epoch of Lightning is all of the run, or
    ``limit_train_batches`` of it.

    ``sample_index``, ``total_tokens`` (the clock of ``TokenLRScheduler``) and ``digest`` are those at the end of the
    batch that is trained on.
    """

    def __init__(
        self,
        url: str,
        batch_size: int | None = None,
        *,
        validation: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._url = url
        self._batch_size = batch_size
        self._options = options
        self._validation = validation
        self._evaluation: _Evaluation | None = None
        if validation is not None:
            # Lightning takes any data module that has the method for one with validation data.
            self.val_dataloader = self._val_dataloader  # type: ignore[method-assign]
        self._stage: str | None = None
        self._loader: _Loader | None = None
        self._follower: _Follower | None = None
        self._state: dict[str, Any] = {}

    def _val_dataloader(self) -> _Evaluation:
        assert self._evaluation is not None, "setup() comes before val_dataloader()"
        return self._evaluation

    @property
    def dataset(self) -> RemoteDataset:
        """That of the fit under way. Its own place is up to a batch ahead of the training."""
        return self._active.dataset

    @property
    def _position(self) -> Point | Loaded | Older:
        return self._active.place

    @property
    def _active(self) -> _Loader:
        if self._loader is None:
            raise RuntimeError(
                "only known while trainer.fit() runs: the dataset is made in its setup()"
            )
        return self._loader

    # What Lightning calls, in this order

    def setup(self, stage: str) -> None:
        """Makes the datasets of a fit, or that of a validation."""
        self._stage = stage
        if self._validation is not None and stage == "validate":
            common = {name: value for name, value in self._options.items() if name in _COMMON}
            common["batch_size"] = self._batch_size
            if (of := self._options.get("launch")) is not None:
                common["process_group"] = of.process_group
            self._evaluation = _Evaluation(
                EvaluationDataset(self._url, **(common | dict(self._validation)))
            )
        if stage != "fit":
            return
        self._loader = self._opened()
        if self._validation is not None:
            self._evaluation = _Evaluation(self._loader.dataset.evaluation(**self._validation))
        self._follower = _Follower(type(self).__qualname__, self._loader)
        # Before all others, so that whatever saves a checkpoint finds this batch counted.
        self._callbacks.insert(0, self._follower)

    def _opened(self) -> _Loader:
        accumulate: int = self._trainer.accumulate_grad_batches
        dataset = RemoteDataset(
            self._url, self._batch_size, **({"accumulate": accumulate} | self._options)
        )
        if self._state:
            dataset.load_state_dict(self._state)
        return _Loader(dataset)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint, for the fit that begins; or within one, of ``Tuner.lr_find``, which goes
        back to where it began."""
        if self._stage not in (None, "fit"):
            return  # a checkpoint that is only validated or tested
        self._state = dict(state_dict)
        if self._loader is None:
            return
        dataset = self._loader.dataset
        if not self._loader.begun:
            dataset.load_state_dict(self._state)
            return
        if self._state == {
            KEY: dataset._start.text
        }:  # saved before the Join, which found out where it begins
            self._state = dict(dataset.state_dict(at=dataset.start_index))
        self._loader = self._opened()
        dataset.close()
        if self._follower is not None:
            self._follower.loader = self._loader

    def train_dataloader(self) -> _Loader:
        """Batches as ``RemoteDataset`` gives them, no sampler between."""
        trainer = self._trainer
        _check_trainer(trainer)
        # "fresh" may always be there, for a crash before the first checkpoint.
        begin = self._options.get("resume") or self._options.get("fork_from") or "fresh"
        if trainer.ckpt_path and not self._state and begin == "fresh":
            raise ValueError(
                f"the checkpoint {trainer.ckpt_path} has no state under {type(self).__qualname__!r}, so the weights "
                "would go on from there and the data from elsewhere: it must have been saved with this data module. "
                'Or say where the data go on: resume="latest" or the id of a snapshot'
            )
        return self._active

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was trained on."""
        return self._loader.state_of_data() if self._loader is not None else self._state

    def teardown(self, stage: str) -> None:
        """Closes the datasets; the state stays, for another fit."""
        self._stage = None
        if self._evaluation is not None:
            self._evaluation.data.close()
            self._evaluation = None
        if self._loader is not None:
            self._state = self.state_dict()
            self._loader.dataset.close()
            self._loader = None
        if self._follower is not None:
            if self._follower in self._callbacks:  # not within a Tuner's trial
                self._callbacks.remove(self._follower)
            self._follower = None

    def on_exception(self, exception: BaseException) -> None:
        """As ``teardown``, which Lightning does not call then."""
        self.teardown("fit")

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, (
            "Lightning gives a data module its trainer before it calls its hooks"
        )
        return self.trainer


class TokenLRModule(LightningModule):
    """A base for modules whose ``configure_optimizers`` gives a ``TokenLRScheduler``: steps it by the run's tokens.

    Lightning steps a scheduler after the optimiser: a step has the rate for the tokens before it.
    """

    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: Any | None) -> None:
        """Steps a ``TokenLRScheduler`` to the tokens of the batch; any other as Lightning does."""
        if not isinstance(scheduler, TokenLRScheduler):
            super().lr_scheduler_step(scheduler, metric)
            return
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TokenloomDataModule):
            raise TypeError(
                "TokenLRModule takes the tokens from a TokenloomDataModule, as in trainer.fit(model, datamodule=…); "
                f"this trainer's data module is {data!r}"
            )
        scheduler.step(data.total_tokens)


class _Fetched(NamedTuple):
    batch: Batch
    place: Point


class _Loader:
    """Gives a dataset's batches out, and keeps those that Lightning fetched until it trains on them.

    Lightning may drop what it fetched ahead, as where a later fit makes a new iterator in its first epoch; a new
    ``iter()`` gives it again.
    """

    def __init__(self, dataset: RemoteDataset) -> None:
        self.dataset = dataset
        self.begun = self.ended = False
        self._begun: Point | None = None
        self._trained: Point | None = None
        self._stepped: Point | None = None
        self._ahead: deque[_Fetched] = deque()

    def __iter__(self) -> Iterator[Batch]:
        if self.ended and not self._ahead:
            raise RuntimeError(
                f"the data ended ({self.dataset.end_reason}) at sample {self.place.sample_index}, but the Trainer "
                "goes on: min_epochs or min_steps asks for more than the run has"
            )
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        self.begun = True
        for fetched in tuple(self._ahead):
            yield fetched.batch
        for batch in self.dataset:
            self._ahead.append(_Fetched(batch, self.dataset.history.last))
            yield batch
        self.ended = True

    @property
    def place(self) -> Point | Loaded | Older:
        """Of the batch that is trained on, or was last."""
        if self._begun is not None:
            return self._begun
        if self._ahead:
            raise RuntimeError("no batch was trained on yet")
        return self.dataset._position

    @property
    def stepped(self) -> bool:
        """Whether the optimiser has stepped on all that was trained on."""
        return self._trained == self._stepped

    def begin(self, batch: object) -> None:
        """The training step of a batch begins."""
        index = batch.get("sample_index") if isinstance(batch, Mapping) else None
        while self._ahead:
            fetched = self._ahead.popleft()
            if fetched.place.sample_index == index:
                self._begun = fetched.place
                return
        kind = (
            f"one with sample_index={index}"
            if isinstance(batch, Mapping)
            else f"a {type(batch).__name__}"
        )
        raise RuntimeError(
            "Lightning trains on a batch that is not one of this data module's: each must come with the sample_index "
            f"that it was given out with, and this is {kind}. Leave sample_index in the batch where "
            "on_before_batch_transfer or a collate changes it, and let training_step take a batch, not dataloader_iter"
        )

    def end(self, *, stepped: bool) -> None:
        """The training step is done, and the optimiser's with it, or not."""
        self._trained = self._begun
        if stepped:
            self._stepped = self._begun

    def state_of_data(self, *, stepped: bool = False) -> dict[str, Any]:
        """The state after the last batch that was trained on, or that the optimiser has ``stepped`` on; before the
        first, where the dataset stood."""
        point, index = self._stepped if stepped else self._trained, None
        if point is not None:
            index = point.sample_index
        elif self._ahead or self._begun is not None:
            index = self.dataset.start_index
        return dict(self.dataset.state_dict(at=index))

    # Lightning takes a loader with these two for one that can go on mid-epoch, and warns of any other. The state is the
    # data module's: Lightning hands a loader its state only in some restarts, not after a whole epoch.

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        pass


class _Evaluation:
    """The same samples each time. Lightning makes an iterator more than it uses, so it begins with the first batch."""

    def __init__(self, dataset: EvaluationDataset) -> None:
        # Lightning looks for an IterableDataset under "dataset", and warns of one that has a length.
        self.data = dataset

    def __iter__(self) -> Iterator[Batch]:
        yield from self.data

    def __len__(self) -> int:
        return len(self.data)


class _Follower(Callback):
    """Tells a loader which batch is trained on, ends the fit with the data, and sets checkpoints that Lightning makes
    between the batches of an optimiser step back to the last one: it does not save gradients, and begins with such a
    save after each resume (the number of steps has not changed, but by its own account it has not saved there)."""

    def __init__(self, key: str, loader: _Loader) -> None:
        self._key = key
        self.loader = loader
        self._global_step = 0
        #: Lightning's counters of batches after the last optimiser step.
        self._progress: dict[str, Any] = {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batches = trainer.accumulate_grad_batches
        check_accumulate(
            self.loader.dataset, batches, "the Trainer steps each accumulate_grad_batches"
        )
        if self.loader.stepped:
            self._global_step = trainer.global_step
            counters = trainer.fit_loop.epoch_loop.state_dict()
            for counted in (
                counters["batch_progress"]["total"],
                counters["batch_progress"]["current"],
            ):
                counted["ready"] -= 1  # this one
            self._progress = {
                name: deepcopy(counters[name]) for name in ("state_dict", "batch_progress")
            }
        self.loader.begin(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._global_step or not pl_module.automatic_optimization
        self.loader.end(stepped=stepped)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.loader.stepped:
            return
        checkpoint[self._key] = self.loader.state_of_data(stepped=True)
        loops = checkpoint["loops"]["fit_loop"]
        for name, value in self._progress.items():
            if (key := f"epoch_loop.{name}") not in loops:
                raise RuntimeError(
                    f"Lightning {version('lightning')} saves no {key!r}, by which a checkpoint between two optimiser "
                    "steps is set back to the first: install an older release, or save at optimiser steps alone"
                )
            loops[key] = deepcopy(value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.loader.ended:
            trainer.should_stop = True


def _check_trainer(trainer: Trainer) -> None:
    """Refuses what would train on other data, or at other rates, than it says. Optimizers are there already."""
    if not trainer.callbacks:  # type: ignore[attr-defined]
        raise ValueError(
            "Tuner.scale_batch_size is not supported: a batch's size is a part of the launch, so its trials would all "
            "have the same. Try sizes by runs of a few steps (max_steps), each with another batch_size of the data "
            "module"
        )
    overfit: float = trainer.overfit_batches  # type: ignore[attr-defined]
    if overfit:
        raise ValueError(
            f"Trainer(overfit_batches={overfit!r}) repeats batches, and a run gives each sample once: "
            "overfit on a run of a small file, with epochs in its mixture"
        )
    accumulate, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
    if isinstance(limit, int) and limit % accumulate:
        raise ValueError(
            f"Trainer(limit_train_batches={limit}, accumulate_grad_batches={accumulate}) ends each epoch with an "
            "optimiser step of fewer batches, whose global_label_tokens would be of others, too: "
            "make limit_train_batches a multiple"
        )
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        if not isinstance(config.scheduler, TokenLRScheduler):
            continue
        if config.interval != "step" or config.frequency != 1:
            raise ValueError(
                f"TokenLRScheduler is stepped at each optimiser step; configure_optimizers gives interval="
                f'{config.interval!r}, frequency={config.frequency}: return {{"optimizer": …, "lr_scheduler": '
                '{"scheduler": …, "interval": "step"}}'
            )
        if not is_overridden("lr_scheduler_step", module, LightningModule):
            raise ValueError(
                f"{type(module).__name__} has a TokenLRScheduler, which Lightning would step without tokens: derive it "
                "from tokenloom.integrations.lightning.TokenLRModule, or override lr_scheduler_step"
            )

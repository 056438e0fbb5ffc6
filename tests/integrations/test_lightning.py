"""Lightning: the example, killed and resumed; and what its Trainer does with the data module."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.forks import Forks
from support.killed import EXAMPLES, kill_and_resume, two_runs
from support.served import url_of

# Lightning's own use of what torch and it have deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:UserWarning"),
]
ROWS = 24
LENGTH = 16


def test_a_fit_that_is_killed_goes_on_as_if_nothing_had_been(
    lightning_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            lightning_forks,
            EXAMPLES / "lightning_fit.py",
            urls,
            tmp_path,
            arguments=["--accelerator", "cpu"],
            environment={"TORCHELASTIC_RUN_ID": "test"},
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run for each test: the same 24 samples, which end."""
    folder = tmp_path_factory.mktemp("lightning")
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(ROWS):
            file.write(
                json.dumps({"text": "abcdefghijklmnopqrstuvwxyz"[row % 26] * (LENGTH - 1)}) + "\n"
            )
    paths = []
    for run in (
        "straight",
        "epochs",
        "twice",
        "between",
        "raises",
        "refused",
        "ends",
        "validated",
        "tuned",
    ):
        source = {"source": "jsonl:rows.jsonl:text", "alias": "rows"} | (
            {"holdout": 0.4} if run == "validated" else {}
        )
        mixture = {
            "run": run,
            "seed": 1,
            "tokenizer": "bytes",
            "sequence_length": LENGTH,
            "mixture": {"policy": "least_consumed", "children": [source]},
        }
        paths.append(folder / f"{run}.yaml")
        paths[-1].write_text(yaml.safe_dump(mixture), encoding="utf-8")
    with url_of(folder, *paths) as url:
        yield url


def test_state_and_rate_are_those_of_the_batch_that_was_trained_on(server: str) -> None:
    # Without a length Lightning fetches one batch more than it trains on.
    from lightning_fits import Model, States, index_of, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    model, states = Model(), States()
    fit = trainer(states, max_steps=3, max_epochs=-1, accumulate_grad_batches=2)
    data = TokenloomDataModule(f"{server}/straight", 2)
    fit.fit(model, datamodule=data)
    assert model.trained == list(range(12))
    assert states.indices == [2, 4, 6, 8, 10, 12]
    assert model.labels == [4 * (LENGTH - 1)] * 6, "of the two batches of an optimiser step"
    assert index_of(data.state_dict()) == 12, "it is there when the fit is over, too"
    # The rate of an optimiser step is that for the tokens behind the step before it.
    expected = Model().configure_optimizers()["lr_scheduler"]["scheduler"]
    assert model.rates == [expected.factor(samples * LENGTH) for samples in (0, 0, 4, 4, 8, 8)]
    assert not fit.callbacks[0].__class__.__module__.startswith("tokenloom"), (
        "what was added is gone"
    )  # type: ignore[attr-defined]


def test_epochs_of_some_batches_follow_each_other_and_resume_within(
    server: str, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_fits import Model, States, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, every_n_train_steps=5)

    model, states = Model(), States()
    data = TokenloomDataModule(f"{server}/epochs", 2)
    options: dict[str, Any] = {"limit_train_batches": 3, "max_epochs": -1}
    trainer(states, checkpoint(), max_steps=6, **options).fit(model, datamodule=data)
    assert model.trained == list(range(12))
    assert states.indices == [2, 4, 6, 8, 10, 12]

    resumed = Model()
    data = TokenloomDataModule(f"{server}/epochs", 2)
    fit = trainer(checkpoint(), max_steps=8, **options)
    fit.fit(resumed, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.trained == list(range(10, 16)), (
        "from behind the fifth step, in the midst of the second epoch"
    )
    assert fit.current_epoch == 3, "two of three batches, and the third cut short"
    assert resumed.rates[0] == model.rates[5]


def test_a_second_fit_goes_on_where_the_first_ended(server: str) -> None:
    from lightning_fits import Model, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    model = Model()
    data = TokenloomDataModule(f"{server}/twice", 2)
    # Lightning leaves the epoch by max_steps and makes a new iterator in the next fit: what it had fetched is dropped.
    fit = trainer(max_epochs=-1, max_steps=2)
    fit.fit(model, datamodule=data)
    fit.fit_loop.epoch_progress.current.processed = (
        fit.fit_loop.epoch_progress.current.completed
    ) = 1
    fit.fit_loop.epoch_loop.max_steps = 5
    fit.fit(model, datamodule=data)
    assert model.trained == list(range(10))


def test_a_checkpoint_between_the_batches_of_a_step_goes_on_from_the_last_step(
    server: str, tmp_path: Path
) -> None:
    from lightning.pytorch import Callback, Trainer
    from lightning_fits import Model, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    class Interrupted(Callback):
        def __init__(self, batch: int) -> None:
            self.batch = batch

        def on_train_batch_end(
            self, trainer: Trainer, _m: Any, _o: Any, _b: Any, batch_idx: int
        ) -> None:
            if batch_idx == self.batch:
                trainer.save_checkpoint(tmp_path / "last.ckpt")
                raise RuntimeError("stop here")

    def data() -> TokenloomDataModule:
        return TokenloomDataModule(f"{server}/between", 2)

    straight = Model()
    with pytest.raises(RuntimeError, match="stop here"):
        trainer(Interrupted(7), accumulate_grad_batches=3).fit(straight, datamodule=data())
    # Lightning saves behind the first batch after a resume, too: there the number of steps is still that of the last.
    for batch in 6, 7:
        again = Model()
        with pytest.raises(RuntimeError, match="stop here"):
            fit = trainer(Interrupted(batch), accumulate_grad_batches=3)
            fit.fit(again, datamodule=data(), ckpt_path=tmp_path / "last.ckpt")
        assert again.trained == list(range(12, 2 * batch + 2)), "from behind the second step"
        assert fit.global_step == 2
    resumed = Model()
    trainer(accumulate_grad_batches=3).fit(
        resumed, datamodule=data(), ckpt_path=tmp_path / "last.ckpt"
    )
    assert resumed.trained == list(range(12, ROWS))
    assert resumed.labels == [6 * (LENGTH - 1)] * 6
    assert resumed.rates[:2] == straight.rates[6:8]


def test_a_step_that_raises_is_not_counted(server: str) -> None:
    import torch
    from lightning_fits import Model, index_of, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    class Raises(Model):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise RuntimeError("out of memory")
            return super().training_step(batch, batch_idx)

    data = TokenloomDataModule(f"{server}/raises", 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer().fit(Raises(), datamodule=data)
    assert index_of(data.state_dict()) == 4
    with pytest.raises(RuntimeError, match="only known while"):
        _ = data.dataset


def test_a_fit_ends_with_the_data(server: str) -> None:
    from lightning_fits import Model, index_of, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    model = Model()
    data = TokenloomDataModule(f"{server}/ends", 4)
    fit = trainer(max_epochs=-1)
    fit.fit(model, datamodule=data)
    assert model.trained == list(range(ROWS))
    assert index_of(data.state_dict()) == ROWS
    assert fit.global_step == ROWS // 4

    data = TokenloomDataModule(f"{server}/ends", 4, resume="latest")
    with pytest.raises(
        RuntimeError, match=r"the data ended .* min_epochs or min_steps asks for more"
    ):
        trainer(max_epochs=-1, min_steps=100).fit(Model(), datamodule=data)


@pytest.mark.filterwarnings("ignore:.*TypedStorage|.*val_dataloader")
def test_the_search_for_a_rate_leaves_the_data_where_they_were_and_that_for_a_batch_size_is_refused(
    server: str, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import LearningRateFinder
    from lightning.pytorch.tuner import Tuner
    from lightning_fits import Model, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    found = Model()
    data = TokenloomDataModule(f"{server}/tuned", 2)
    fit = trainer(max_steps=4, default_root_dir=tmp_path)
    Tuner(fit).lr_find(found, datamodule=data, num_training=4, attr_name="rate", update_attr=False)
    assert found.trained == list(range(8))
    fit.fit(found, datamodule=data)
    trainer(max_steps=2).fit(found, datamodule=data)
    assert found.trained[8:] == list(range(12))

    # Within a fit; and where only the Join finds out where the data begin.
    model, finder = Model(), LearningRateFinder(num_training_steps=3, update_attr=False)
    trainer(finder, max_steps=2, default_root_dir=tmp_path).fit(
        model, datamodule=TokenloomDataModule(f"{server}/tuned", 2, resume="latest")
    )
    begin = model.trained[0]
    assert begin >= 12
    assert model.trained == [*range(begin, begin + 6), *range(begin, begin + 4)]

    model.batch_size = 2
    with pytest.raises(
        ValueError,
        match=r"scale_batch_size is not supported: a batch's size is a part of the launch",
    ):
        Tuner(trainer(default_root_dir=tmp_path)).scale_batch_size(
            model, datamodule=TokenloomDataModule(f"{server}/tuned", 2, resume="latest")
        )


def test_validation_has_the_same_samples_each_time_and_training_knows_nothing_of_it(
    server: str,
) -> None:
    from lightning_fits import Model, States, index_of, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    class Validated(Model):
        def __init__(self) -> None:
            super().__init__()
            self.ids: list[list[int]] = []
            self.passes: list[list[list[int]]] = []

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.ids += batch["input_ids"][batch["source_ids"] >= 0].tolist()

        def on_validation_epoch_end(self) -> None:
            self.passes.append(self.ids)
            self.ids = []

    model, states = Validated(), States()
    data = TokenloomDataModule(f"{server}/validated", 2, validation={"samples": 3})
    data = copy.deepcopy(data)  # as a strategy that spawns processes hands it over
    fit = trainer(states, limit_train_batches=2, max_epochs=2, num_sanity_val_steps=0)
    fit.fit(model, datamodule=data)
    assert model.trained == list(range(8))
    assert states.indices == [2, 4, 6, 8]
    assert len(model.passes) == 2
    assert len(model.passes[0]) == 3
    assert model.passes[0] == model.passes[1]

    fit.validate(model, datamodule=data, verbose=False)
    assert model.passes[2] == model.passes[0]
    assert index_of(data.state_dict()) == 8


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_what_would_train_otherwise_than_it_says_is_refused(server: str, tmp_path: Path) -> None:
    import torch
    from lightning.pytorch import LightningModule
    from lightning_fits import Model, trainer
    from tokenloom.integrations.lightning import TokenloomDataModule

    def refused(
        message: str, model: LightningModule, ckpt_path: Path | None = None, **options: Any
    ) -> None:
        with pytest.raises(Exception, match=message):
            trainer(**options).fit(
                model, datamodule=TokenloomDataModule(f"{server}/refused", 2), ckpt_path=ckpt_path
            )

    refused(r"overfit_batches=2\) repeats batches", Model(), overfit_batches=2)
    refused(
        "make limit_train_batches a multiple",
        Model(),
        limit_train_batches=3,
        accumulate_grad_batches=2,
    )
    data = TokenloomDataModule(f"{server}/refused", 2, accumulate=2)
    with pytest.raises(
        ValueError, match="has accumulate=2, but the Trainer steps each accumulate_grad_batches=3"
    ):
        trainer(accumulate_grad_batches=3).fit(Model(), datamodule=data)
    refused(r'gives interval=\'epoch\'.*"interval": "step"', Model("epoch"))

    class Plain(LightningModule):
        training_step, configure_optimizers = Model.training_step, Model.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.table, self.interval = torch.nn.Embedding(258, 258), "step"

    refused("derive it from tokenloom.integrations.lightning.TokenLRModule", Plain())

    class Iterates(Model):
        def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
            raise AssertionError

    refused("not one of this data module's", Iterates())

    checkpoint = tmp_path / "others.ckpt"
    fit = trainer()
    fit.strategy.connect(Model())
    fit.save_checkpoint(checkpoint)
    refused("has no state under 'TokenloomDataModule'", Model(), checkpoint)
    # Nor is it taken where a script begins again without a checkpoint.
    data = TokenloomDataModule(f"{server}/refused", 2, resume="fresh")
    with pytest.raises(ValueError, match="has no state under 'TokenloomDataModule'"):
        trainer().fit(Model(), datamodule=data, ckpt_path=checkpoint)

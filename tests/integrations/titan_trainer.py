"""A trainer that uses its data loader as torchtitan does, with processes that share a data-parallel rank.

Of torchtitan's ``Configurable``, ``BaseDataLoader``, trainer and checkpointer (at commit b5bcd76 of August 2026) this
has what they ask of a loader: a nested config whose ``build`` makes it on every process and names the data-parallel
rank, pairs of flat inputs and labels, and a state that the checkpointer collects behind a step and DCP writes in the
background.
"""

from __future__ import annotations

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenloom import TokenLRScheduler
from tokenloom.integrations.torchtitan import TokenloomConfig, TokenloomDataLoader
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, VOCABULARY = 128, 16, 258


class Configurable:
    """A class with a config that builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__, "a Config is a dataclass with slots"
            cls.Config._owner = cls


class BaseDataLoader(Stateful, ABC, Configurable):
    """What torchtitan's loaders derive from."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]: ...

    def close(self) -> None:
        pass


class Loader(TokenloomDataLoader, BaseDataLoader):
    """As docs/integrations/torchtitan.md has it."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenloomConfig, BaseDataLoader.Config):
        pass


class Model(nn.Module):
    """The next token from the token and its position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.head(self.tokens(inputs) + self.places(positions)), labels
        )


class Trainer(Stateful):
    """torchtitan's loop and checkpointer, less what has nothing to do with data."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp")
        )
        self.loader = Loader.Config(url=options.url).build(
            dp_world_size=mesh["dp"].size(),
            dp_rank=mesh["dp"].get_local_rank(),
            tokenizer=None,
            max_context_length=CONTEXT,
            num_tokens_per_batch=options.batch_size * CONTEXT,
        )
        torch.manual_seed(0)
        self.model = Model()
        self.replica = DistributedDataParallel(self.model, process_group=mesh["dp"].get_group())
        self.data_parallel = mesh["dp"].get_group()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-1)
        self.scheduler = TokenLRScheduler(
            self.optimizer, warmup_tokens=4096, target_tokens=options.samples * CONTEXT
        )
        self.step = 0
        self.gloo = dist.new_group(backend="gloo")
        self.saving: Future[Any] | None = None
        self.states = {
            "model": self.model.state_dict(),
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
            "train_state": self,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self) -> None:
        saved = sorted(metadata.parent for metadata in self.options.checkpoint.glob("*/.metadata"))
        if saved:
            dcp.load(self.states, checkpoint_id=saved[-1])
        batches = iter(self.loader)
        dataset = self.loader.dataset
        while dataset.sample_index < self.options.samples:
            self.step += 1
            input_dict, labels = next(batches)
            assert input_dict["input"].shape == labels.shape == (self.options.batch_size * CONTEXT,)
            loss = self.replica(input_dict["input"], labels, input_dict["positions"])
            self.optimizer.zero_grad()
            loss.backward()
            self.scheduler.step(dataset.total_tokens)
            self.optimizer.step()
            dist.all_reduce(total := loss.detach().clone(), group=self.data_parallel)
            self.record(total.item() / dist.get_world_size(self.data_parallel))
            if self.step % self.options.every == 0:
                if self.saving is not None:
                    self.saving.result()
                checkpoint_id = self.options.checkpoint / f"{dataset.sample_index:012}"
                self.saving = dcp.async_save(
                    self.states, checkpoint_id=checkpoint_id, process_group=self.gloo
                )
        if self.saving is not None:
            self.saving.result()
        self.loader.close()

    def record(self, loss: float) -> None:
        """By the last process, which is no leader."""
        dataset = self.loader.dataset
        if dist.get_rank() == dist.get_world_size() - 1:
            line = {"sample_index": dataset.sample_index, "digest": dataset.digest, "loss": loss}
            with self.options.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"lr": self.scheduler.get_last_lr()[0]}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--tp", type=int, default=1)
    for name in ("--batch-size", "--samples"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--checkpoint", "--record"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--every", type=int, default=5)
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).train()
    dist.destroy_process_group()

"""Processes that have torch, or a framework, imported already: ranks are forks of these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.forks import Forks


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[Forks]:
    """With torch and the client."""
    # The first optimizer imports the compiler.
    forks = Forks(
        *("torch.distributed", "torch._dynamo", "torch.nn.parallel", "tokenloom"),
        *(
            "torch.distributed.fsdp",
            "torch.distributed.checkpoint.state_dict",
            "torch.distributed.device_mesh",
        ),
        *("torch.distributed.tensor.parallel", "tokenloom.integrations.mesh"),
        *("torchdata.stateful_dataloader", "torch.utils.data.graph_settings"),
    )
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def transformers_forks() -> Iterator[Forks]:
    """With Accelerate, Trainer and the model of the examples."""
    torch = (
        "torch.distributed",
        "torch._dynamo",
        "torch.nn.parallel",
        "torch.profiler",
        "torch.distributed.algorithms.join",
    )
    forks = Forks(
        *torch,
        "accelerate",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "tokenloom",
    )
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def lightning_forks() -> Iterator[Forks]:
    """With Lightning, too."""
    # Its first checkpoint imports every file system that is installed.
    forks = Forks(
        *("torch.distributed", "torch._dynamo", "torch.nn.parallel", "s3fs"),
        *("lightning.pytorch", "tokenloom.integrations.lightning"),
    )
    yield forks
    forks.close()

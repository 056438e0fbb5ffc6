"""Processes that have torch, or a framework, imported already: ranks are forks of these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.scripts import Forks


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[Forks]:
    """With torch and the client."""
    # The first optimizer imports the compiler.
    forks = Forks(
        *("torch.distributed", "torch._dynamo", "torch.nn.parallel", "tokenloom"),
        *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.device_mesh"),
    )
    yield forks
    forks.close()

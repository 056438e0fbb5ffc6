"""JAX: the example, killed and resumed on another number of processes, each with several devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forks import Forks
from support.killed import EXAMPLES, kill_and_resume, two_runs

#: Arrays that JAX took as they are, while their memory would be used again if nothing held it.
TAKEN = """
import jax, numpy as np
from tokenloom.batch.packed import ArrayPool

jax.config.update("jax_enable_x64", True)
pool = ArrayPool((4, 4096), 8)
taken = []
for number in range(40):
    (array,) = pool.take(1)
    array.fill(number)
    taken.append(jax.device_put(array))
    del array
    taken = taken[-6:]
    jax.block_until_ready(taken)
    assert [int(one.min()) for one in taken] == [int(one.max()) for one in taken]
    assert [int(one.max()) for one in taken] == list(range(number + 1))[-6:]
"""


@pytest.fixture(scope="module")
def jax_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """With JAX and Orbax, and without torch. What one compiles, the others find."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAX_PLATFORMS", "cpu")
        environment.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        environment.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        forks = Forks("jax", "jax.experimental.multihost_utils", "orbax.checkpoint", "tokenloom")
    yield forks
    forks.close()


def test_jax_that_is_killed_goes_on_on_another_number_of_processes(
    jax_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            jax_forks,
            EXAMPLES / "jax_training.py",
            urls,
            tmp_path,
            world_size=1,
            resumed_world_sizes=[2],
            first_steps=5,
            # Orbax writes in the background: when a save begins, the one before it is over.
            arguments=["--every", 2],
            environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        )


def test_memory_that_jax_took_without_a_copy_is_not_used_again(
    jax_forks: Forks, tmp_path: Path
) -> None:
    script, output = tmp_path / "taken.py", tmp_path / "output.txt"
    script.write_text(TAKEN, encoding="utf-8")
    assert jax_forks.fork(script, [], output=output).wait() == 0, output.read_text(encoding="utf-8")

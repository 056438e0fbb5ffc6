"""A Ray cluster of several raylets on this machine, in a folder of its own."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

STORE_BYTES = 100_000_000
BYTECODE = Path(__file__).parents[2] / ".cache/bytecode"
#: A node without what the tests do not look at: each process of Ray's takes a second to import it.
FEWEST_PROCESSES = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}

#: What Ray does by itself. In a process of tests, clusters start after commands that would be less patient.
RAYS_PATIENCE = {
    "RAY_NUM_REDIS_GET_RETRIES": "20", "RAY_gcs_rpc_server_connect_timeout_s": "5",
    "RAY_py_gcs_connect_timeout_s": "30", "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "5",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "30",
}  # fmt: skip


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A folder of its own for the files of a Ray that is started meanwhile, by whichever process."""
    # The paths of sockets have 107 bytes at most, so no folder of pytest's will do.
    folder = Path(tempfile.mkdtemp(prefix="tl", dir="/tmp"))
    (folder / "ray").mkdir()
    # A developer's own cluster may have left a token.
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled",
        # Processes for tasks are started as tasks come.
        "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0",
        # Where the environment keeps no bytecode, each of them would compile all that it imports.
        "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(BYTECODE),
        **RAYS_PATIENCE,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_TMPDIR": str(folder), **quiet}.items():
            patch.setenv(name, value)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_cluster(*nodes: dict[str, Any]) -> Iterator[Any]:
    """``ray.cluster_utils.Cluster`` whose head has the first of ``nodes`` as its options, one CPU where these name
    none."""
    with ray_folder(), pytest.MonkeyPatch.context() as patch:
        from ray.cluster_utils import Cluster

        # Without a dashboard there is a process that serves nothing, for which a head waits as it starts.
        patch.setattr("ray._private.node.Node.start_api_server", lambda *_, **__: None)
        logging.getLogger("ray").setLevel(logging.ERROR)
        cluster = Cluster()
        try:
            for node in nodes or ({},):
                add_node(cluster, **node)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Any, **options: Any) -> None:
    """One more raylet."""
    with warnings.catch_warnings():
        # Ray leaves it to the collector to close the logs of the processes that it starts.
        warnings.simplefilter("ignore", ResourceWarning)
        cluster.add_node(
            **{"num_cpus": 1, "object_store_memory": STORE_BYTES, **options}, **FEWEST_PROCESSES
        )

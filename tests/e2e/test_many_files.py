"""A mixture of more sources than a process may open files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import yaml
from support.corpora import id_rows, mixture, write_parquet
from tokenloom import RemoteDataset


def test_a_limit_of_open_files_is_raised_and_where_it_cannot_be_the_server_refuses_to_start(
    tmp_path: Path,
) -> None:
    names = [f"{i:02d}" for i in range(60)]
    for name in names:
        write_parquet(tmp_path / f"{name}.parquet", id_rows(40, int(name), 40))
    children = [{"source": f"parquet:{name}.parquet:ids"} for name in names]
    document = mixture(mixture={"policy": "round_robin", "children": children})
    path = tmp_path / "many.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    limits = {
        "soft": "ulimit -S -n 100",
        "enough": "ulimit -n 704",
        "hard": "ulimit -n 703",
        "least": "ulimit -n 511",
    }
    printed, ready = {}, {}
    for name, limit in limits.items():
        command = f"{limit}; exec {sys.executable} -m tokenloom_tools serve many.yaml --grpc 127.0.0.1:0 --rest "
        command += f"127.0.0.1:0 --ledger sqlite:///{name}.db --ready-file {name}.json"
        with (tmp_path / f"{name}.log").open("wb") as log:
            server = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, stdout=log, stderr=log)
        try:
            while server.poll() is None and not (tmp_path / f"{name}.json").exists():
                time.sleep(0.05)
            ready[name] = server.poll() is None and first_batches(tmp_path / f"{name}.json", 30)
        finally:
            server.terminate()
            server.wait(120)
        printed[name] = (tmp_path / f"{name}.log").read_text(encoding="utf-8")
    assert ready == {"soft": True, "enough": True, "hard": False, "least": False}
    assert (
        "703 files and connections open, and a server of 60 sources needs 704: raise the limit"
        in printed["hard"]
    )
    assert (
        "511 files and connections open, and a server needs 512: raise the limit"
        in printed["least"]
    )
    assert "ulimit -n 512" in printed["least"]
    assert "Traceback" not in printed["hard"] + printed["least"]


def first_batches(ready: Path, count: int) -> bool:
    """Whether a trainer gets so many batches of a server that wrote a ready file."""
    address = json.loads(ready.read_text())["grpc"]
    with RemoteDataset(f"grpc://{address}/test", 2) as dataset:
        batches = iter(dataset)
        return all(next(batches) for _ in range(count))

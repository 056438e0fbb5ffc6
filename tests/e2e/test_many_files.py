"""A mixture of more sources than a process may open files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml
from support.corpora import id_rows, mixture, write_parquet
from support.waiting import wait_for
from tokenloom import RemoteDataset, TokenloomError


def test_a_limit_of_open_files_is_raised_and_where_it_cannot_be_it_is_what_the_error_names(tmp_path: Path) -> None:
    names = [f"{i:02d}" for i in range(60)]
    for name in names:
        write_parquet(tmp_path / f"{name}.parquet", id_rows(40, int(name), 40))
    children = [{"source": f"parquet:{name}.parquet:ids"} for name in names]
    document = mixture(mixture={"policy": "round_robin", "children": children})
    path = tmp_path / "many.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    limits = {"soft": "ulimit -S -n 100", "hard": "ulimit -n 100"}
    said = {}
    for name, limit in limits.items():
        command = f"{limit}; exec {sys.executable} -m tokenloom_server serve many.yaml --grpc 127.0.0.1:0 --rest "
        command += f"127.0.0.1:0 --ledger sqlite:///{name}.db --ready-file {name}.json"
        server = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            said[name] = first_batches(tmp_path / f"{name}.json", 30)
        finally:
            server.terminate()
            server.wait(30)
    assert said["soft"] == "30"
    assert "Too many open files" in said["hard"]
    assert "ulimit -n" in said["hard"]
    assert "damaged" not in said["hard"]


def first_batches(ready: Path, count: int) -> str:
    """How many batches a trainer gets of a server that writes a ready file, or what it is refused with."""
    wait_for(ready.exists, "the server", 30)
    address = json.loads(ready.read_text())["grpc"]
    with RemoteDataset(f"grpc://{address}/test", 2) as dataset:
        batches = iter(dataset)
        try:
            for _ in range(count):
                next(batches)
        except TokenloomError as error:
            return str(error)
    return str(count)

"""Experiment trackers, by the real libraries writing to disk, and what is read back of that."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.corpora import CODE, DOCS, flat, mixture, write_corpus
from support.served import over_grpc, runs_of
from tokenloom import LocalDataset, RemoteDataset, SourceLoss
from tokenloom.integrations.trackers import TensorBoardTracker, Tracker, WandbTracker
from tokenloom_server.config.mixture_change import MixtureChange

STEPS = (2, 5)
#: What another Python needs to find this module and its helpers.
HERE = (Path(__file__).parent, Path(__file__).parents[1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    document = mixture()
    document["mixture"]["children"][2]["children"][1]["alias"] = (
        "txt:data/prose/?.txt:text"  # as prose, but for a sign
    )
    (folder / "mixture.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return folder


@pytest.fixture
def dataset(corpus: Path, tmp_path: Path) -> Iterator[LocalDataset]:
    shutil.copytree(corpus, tmp_path / "corpus")
    with LocalDataset(tmp_path / "corpus" / "mixture.yaml", batch_size=4) as dataset:
        yield dataset


def _train(dataset: LocalDataset, tracker: Tracker) -> dict[int, dict[str, float]]:
    """Some steps in which a token's loss is its source's id; what was logged at two of them."""
    source_loss, logged = SourceLoss(dataset), {}
    for step, batch in zip(range(1, max(STEPS) + 1), dataset, strict=False):
        source_loss.add(batch["source_ids"][:, None].expand(-1, 8).to(torch.float32), batch)
        if step in STEPS:
            logged[step] = tracker.log(step, source_loss.reduce())
    return logged


def _check(read: dict[str, list[tuple[int, float]]], logged: dict[int, dict[str, float]]) -> None:
    """What a tracker holds, by name, is what was logged, and that has all that it should have."""
    for step, figures in logged.items():
        for name, value in figures.items():
            assert dict(read[name])[step] == pytest.approx(value, rel=1e-6), name
    last = logged[max(STEPS)]
    assert last["tokenloom/sample_index"] == 20 and last["tokenloom/revision"] == 0
    assert last["tokenloom/wait_ms_mean"] >= 0
    for kind in ("share", "recent_share"):
        assert math.fsum(
            value for name, value in last.items() if f"/{kind}/" in name
        ) == pytest.approx(1)
    assert last["tokenloom/share/code"] == pytest.approx(9 / 20)
    assert last["tokenloom/loss/docs"] == 1.0
    names = {
        "tokenloom/share/txt_data_prose_.txt_text",
        "tokenloom/share/txt_data_prose_.txt_text_3",
    }
    assert names < set(last), "specs become names that every tracker takes, each another one"


def test_tensorboard_has_them_in_its_event_files(dataset: LocalDataset, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "logs") as writer:
        logged = _train(dataset, TensorBoardTracker(dataset, writer))

    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    _check({name: [(each.step, each.value) for each in of] for name, of in scalars.items()}, logged)


#: Its one argument is a folder. Prints what the store holds of a run that was trained on, and what was logged.
MLFLOW = """
import json, mlflow, sys
from pathlib import Path
import test_trackers as here
from tokenloom import LocalDataset
from tokenloom.integrations.trackers import MlflowTracker

folder = Path(sys.argv[1])
mlflow.set_tracking_uri((folder / "mlruns").as_uri())
with mlflow.start_run() as run, LocalDataset(folder / "corpus" / "mixture.yaml", batch_size=4) as dataset:
    logged = here._train(dataset, MlflowTracker(dataset, run))
client = mlflow.MlflowClient()
names = client.get_run(run.info.run_id).data.metrics
history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
print(json.dumps([{name: [(each.step, each.value) for each in of] for name, of in history.items()}, [*logged.items()]]))
"""


def test_mlflow_has_them_in_its_store(corpus: Path, tmp_path: Path) -> None:
    """In the environment that has a package otherwise than the image (Makefile)."""
    shutil.copytree(corpus, tmp_path / "corpus")
    python = Path(sys.prefix) / "mlflow" / "bin" / "python"
    assert python.exists(), f"{python} is missing: run make install"
    # The skinny package has no other store on disk.
    environment = os.environ | {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "PYTHONPATH": os.pathsep.join(map(str, HERE)),
    }
    output = subprocess.run(
        [python, "-c", MLFLOW, tmp_path],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=500,
    ).stdout
    stored, logged = json.loads(output.splitlines()[-1])
    _check(
        {name: [(step, value) for step, value in of] for name, of in stored.items()}, dict(logged)
    )


def _wandb_records(path: Path) -> Iterator[bytes]:
    """The records of W&B's offline file: after a header, blocks of 32 KiB as LevelDB's log has them."""
    data, position, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if (left := -position % 2**15) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            yield parts
            parts = b""


def test_wandb_has_them_in_its_offline_file(
    dataset: LocalDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    quiet = wandb.Settings(
        x_disable_stats=True, x_disable_meta=True, disable_git=True, console="off"
    )
    with wandb.init(mode="offline", dir=tmp_path, settings=quiet) as run:
        logged = _train(dataset, WandbTracker(dataset, run))
    wandb.teardown()  # the process that writes

    read = dict[str, list[tuple[int, float]]]()
    for data in _wandb_records(next(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))):
        history = Record.FromString(data).history
        for item in history.item:
            name = item.key or "/".join(item.nested_key)
            read.setdefault(name, []).append((history.step.num, float(json.loads(item.value_json))))
    _check({name: of for name, of in read.items() if name.startswith("tokenloom/")}, logged)


class _Kept(Tracker):
    written: dict[str, Any] | None = None

    def _write(self, figures: Any, step: int) -> None:
        self.written = figures


def test_a_revision_counts_from_its_first_sample_on_and_other_ranks_write_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    path = tmp_path / "corpus" / "mixture.yaml"
    document = flat([CODE, DOCS], run="r", window_micro_steps=4)
    document["mixture"]["epochs"] = math.inf
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with (
        runs_of(tmp_path, path) as runs,
        over_grpc(runs) as address,
        RemoteDataset(f"grpc://{address}/r", 4) as dataset,
    ):
        tracker, batches = _Kept(dataset), iter(dataset)
        next(batches)
        change = {"reason": "why", "set": [{"child": CODE, "weight": 3}]}
        first = runs.get("r").mixture.revise(MixtureChange.model_validate(change)).sample_index
        seen = {}
        while dataset.sample_index <= first + 4:
            next(batches)
            seen[dataset.sample_index] = tracker.log(1)["tokenloom/revision"]
        assert seen == {index: index > first for index in seen} and set(seen.values()) == {0, 1}
        assert not any(name.startswith("tokenloom/loss/") for name in tracker.written or {})

        monkeypatch.setattr(RemoteDataset, "rank", 1)
        tracker.written = None
        assert (tracker.log(2), tracker.written) == ({}, None)

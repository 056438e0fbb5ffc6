"""``NumpyDataset``, and the package where there is no torch: the batches, states and digests of ``RemoteDataset``."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.messages import step_numbers
from tokenloom import LaunchOptions, NumpyDataset, PeekDataset, RemoteDataset
from tokenloom.batch.arrays import ArrayMaker
from tokenloom.batch.layout import OPTIONAL_COLUMNS, Layout
from tokenloom.batch.rows import Bucket, Feature, RowsMessage
from tokenloom_proto.errors import ProtocolError

WITHOUT_TORCH = """
import hashlib, importlib.abc, json, os, sys, threading

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "typing_extensions", "ml_dtypes"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

before = {name.partition(".")[0] for name in sys.modules}
sys.meta_path.insert(0, Hidden())
import tokenloom

def columns(batch):
    return {k: hashlib.md5(str((v.dtype, v.shape)).encode() + v.tobytes()).hexdigest() if hasattr(v, "dtype") else v
            for k, v in batch.items()}

refused = {}
for name in set(tokenloom.__all__):
    try:
        getattr(tokenloom, name)
    except ModuleNotFoundError as error:
        refused[name] = str(error)
url, names = sys.argv[1], json.loads(sys.argv[2])
over = tokenloom.LaunchOptions(attempt="numpy", takeover=True)
takes = tokenloom.LaunchOptions(takeover=True)
with tokenloom.NumpyDataset(url, 4, columns=names, resume="fresh", launch=takes) as dataset:
    alone = [columns(batch) for _, batch in zip(range(3), dataset)]
    state, run = dataset.state_dict(), dataset.stats()["run"]

ranks, states = [[], []], {}
def train(rank):
    slot = {"rank": rank, "world_size": 2, "launch": over}
    with tokenloom.NumpyDataset(url, 1, columns=names, **slot) as dataset:
        dataset.load_state_dict(state)
        ranks[rank] += [columns(batch) for _, batch in zip(range(2), dataset)]
        states[rank] = dataset.state_dict(), dataset.digest, dataset.total_tokens

threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
# As a launcher sets them.
os.environ.update(RANK="1", WORLD_SIZE="2")
slot = tokenloom.NumpyDataset(url, 1, launch=tokenloom.LaunchOptions(attempt="launched"))
try:
    tokenloom.NumpyDataset(url, 1)
except ValueError as error:
    refused["without attempt"] = str(error)
imported = {name.partition(".")[0] for name in sys.modules if name[0] != "_"} - before - sys.stdlib_module_names
print(json.dumps({"alone": alone, "ranks": ranks, "states": [states[0], states[1]], "run": run, "refused": refused,
                  "imported": sorted(imported), "slot": [slot.rank, slot.world_size]}))
"""


def columns(batch: Any) -> dict[str, Any]:
    """What a batch holds, its arrays by type, shape and bytes."""
    arrays = {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    return {
        name: hashlib.md5(str((value.dtype, value.shape)).encode() + value.tobytes()).hexdigest()
        if isinstance(value, np.ndarray)
        else value
        for name, value in arrays.items()
    }


def test_without_torch_batches_states_and_digests_are_those_that_torch_gets(server: str) -> None:
    url = f"{server}/same"
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, url, json.dumps(OPTIONAL_COLUMNS)],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    seen = json.loads(answer.stdout)

    # grpc imports its own additions where they are.
    grpc = {"grpc", "grpc_health", "grpc_reflection", "cython_runtime"}
    assert set(seen["imported"]) <= {"google", "numpy", "tokenloom", "tokenloom_proto"} | grpc
    assert seen["slot"] == [1, 2]
    assert "rank 1 of 2 needs an attempt id that is new for each launch" in seen["refused"].pop(
        "without attempt"
    )
    assert sorted(seen["refused"]) == [
        *(
            "EvaluationDataset",
            "LocalDataset",
            "MeanLosses",
            "PeekDataset",
            "RemoteDataset",
            "SourceLoss",
        ),
        *("TokenLRScheduler", "mean_loss", "token_losses"),
    ]
    assert "tokenloom.RemoteDataset needs torch" in seen["refused"]["RemoteDataset"]
    assert "pip install 'tokenloom[torch]'" in seen["refused"]["RemoteDataset"]
    assert seen["run"] == "same"
    with PeekDataset(url, 4, at="fresh", columns=OPTIONAL_COLUMNS) as whole:
        batches = iter(whole)
        assert seen["alone"] == [columns(next(batches)) for _ in range(3)]
        next(batches)
        (state, digest, tokens), other = seen["states"]
        assert [state, digest, tokens] == other
        assert (digest, tokens) == (whole.digest, whole.total_tokens)
        with PeekDataset(url, 1, at=12, columns=OPTIONAL_COLUMNS) as samples:
            one_by_one = [columns(batch) for _, batch in zip(range(4), samples, strict=False)]
        by_ranks = {batch["sample_ids"]: batch for rank in seen["ranks"] for batch in rank}
        assert by_ranks.keys() == {batch["sample_ids"] for batch in one_by_one}
        for batch in one_by_one:
            for name in ("input_ids", "labels", "source_ids", *OPTIONAL_COLUMNS):
                assert batch[name] == by_ranks[batch["sample_ids"]][name], name
        # And torch goes on where numpy stood.
        with RemoteDataset(
            url, 4, launch=LaunchOptions(takeover=True), columns=OPTIONAL_COLUMNS
        ) as dataset:
            dataset.load_state_dict(state)
            assert [columns(batch) for batch in dataset] == [columns(batch) for batch in batches]
            assert dataset.digest == whole.digest


def test_importing_the_package_does_not_import_torch_where_it_is() -> None:
    script = "import sys, tokenloom; assert 'torch' not in sys.modules; print(dir(tokenloom))"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "'RemoteDataset'" in answer.stdout


def test_an_array_is_its_holders_alone_and_may_be_written_to(server: str) -> None:
    with NumpyDataset(
        f"{server}/shifted", 2, resume="fresh", launch=LaunchOptions(takeover=True)
    ) as dataset:
        batches = iter(dataset)
        first = next(batches)["input_ids"][0]  # a view holds the memory, too
        first[:] = 7
        for _ in range(6):
            batch = next(batches)
            assert not np.shares_memory(first, batch["input_ids"])
            assert not np.shares_memory(batch["input_ids"], batch["labels"])
        assert (first == 7).all()


def rows(dtype: str) -> RowsMessage:
    features = Feature("x", dtype, (3,)), Feature("empty", "float32", (0,))
    data = np.arange(12, dtype="<u2").view(np.uint8)[: 2 * features[0].bytes].tobytes()
    return RowsMessage(
        2, step_numbers([0, 0]), data=data, buckets=[Bucket("b", "s", features, None)]
    )


def test_rows_have_numpys_types_and_where_there_are_none_those_of_ml_dtypes() -> None:
    maker = ArrayMaker(
        Layout(batch_size=2, sequence_length=1, id_type="<u1", shifted=False, rows=True)
    )
    for dtype in ("float16", "bfloat16", "float8_e4m3fn"):
        batch = maker.batch(rows(dtype), 0)
        assert batch["x"].dtype == (np.float16 if dtype == "float16" else getattr(ml_dtypes, dtype))
        assert (batch["x"].shape, batch["empty"].shape, batch["empty"].dtype) == (
            (2, 3),
            (2, 0),
            np.float32,
        )
        assert batch["x"].tobytes() == np.arange(12, dtype="<u2").tobytes()[: batch["x"].nbytes]

    with pytest.raises(
        ProtocolError,
        match=r"'x' is of dtype 'float8_e9m9', which numpy does not have: pip install -U",
    ):
        maker.batch(rows("float8_e9m9"), 0)

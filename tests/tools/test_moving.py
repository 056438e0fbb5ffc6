"""Jobs that move here in the middle of an epoch: what is left is what their own library would have read."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from support.corpora import mixture, order_of
from support.mosaic import mosaic, write_mds
from tokenloom import LocalDataset
from tokenloom_server.core.state import SourceState
from tokenloom_tools.cli.app import app
from tokenloom_tools.moving import litdata_flags, mosaic_flags
from typer.testing import CliRunner

SAMPLES = 103
#: The id that ends a document of bytes.
END = 256
TEXTS = [f"sample {number}" for number in range(SAMPLES)]
#: As a state names them, in a job of one node.
STATE = {
    "epoch": 0,
    "sample_in_epoch": 35,
    "num_canonical_nodes": 1,
    "shuffle_seed": 9176,
    "initial_physical_nodes": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moving")
    write_mds(folder / "mds", {"text": "str"}, [{"text": text} for text in TEXTS], size_limit=500)
    return folder


@pytest.fixture(autouse=True)
def without_shared_memory_of_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mosaic's datasets keep their shared memory, and open that of all before them, until the process ends."""
    cleanups: list[Any] = []
    monkeypatch.setattr(
        mosaic().base.shared.memory, "atexit", SimpleNamespace(register=cleanups.append)
    )
    yield
    gc.collect()
    for cleanup in cleanups:
        cleanup()


def number_of(text: str) -> int:
    return int(text.split()[1])


def invoke(folder: Path, *arguments: str) -> str:
    """What the command prints, in the folder of the mixture file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(app, ["import", *arguments])
    assert result.exit_code in (0, 2), result.output
    return result.output


def read_here(folder: Path, source: str) -> Iterator[tuple[int, int]]:
    """The epoch and number of each sample that a run gives which has the printed source in its mixture file."""
    (child,) = yaml.safe_load(source)
    children = [child | {"epochs": 2}]
    fields = {
        "mixture": {"policy": "weighted", "children": children},
        "packing": "none",
        "sequence_length": 32,
    }
    for (document,) in order_of(folder, mixture(**fields)).spans(0, SourceState(), 10**6):
        yield document.epoch, number_of(bytes(document.ids[:-1].tolist()).decode())


# --- Mosaic streaming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [3, 19])
def test_what_mosaic_streaming_had_not_read_of_its_second_epoch_is_read_here(
    folder: Path, batches: int
) -> None:
    streaming = mosaic()
    dataset = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=5)
    loader = streaming.StreamingDataLoader(dataset, batch_size=5)
    assert len(list(loader)) == 21
    running = iter(loader)
    seen = [number_of(text) for _ in range(batches) for text in next(running)["text"]]
    (folder / "state.json").write_text(json.dumps(loader.state_dict()))
    rest = [number_of(text) for batch in running for text in batch["text"]]

    source = invoke(
        folder, "mosaic", "state.json", "mds:mds:text",
        *("--output", "seen.npy", "--argument", "shuffle=true", "--argument", "batch_size=5"),
    )  # fmt: skip
    assert (
        f"# {len(seen)} of 103 samples of the epoch were read, and {len(rest)} are left" in source
    )
    read = list(read_here(folder, source))
    assert sorted(row for epoch, row in read if epoch == 0) == sorted(rest)
    assert sorted(row for epoch, row in read if epoch == 1) == list(range(SAMPLES))


def test_the_first_launch_goes_on_with_the_rest_by_the_old_clock(folder: Path) -> None:
    (folder / "state.json").write_text(json.dumps(STATE))
    source = invoke(folder, "mosaic", "state.json", "mds:mds:text", "--output", "seen.npy")
    fields = mixture(mixture={"policy": "weighted", "children": yaml.safe_load(source)})
    (folder / "mixture.yaml").write_text(yaml.safe_dump(fields))

    with LocalDataset(folder / "mixture.yaml", batch_size=1) as dataset:
        dataset.load_state_dict({"sample_index": 0, "total_tokens": 1_250_000_000})
        batches = list(dataset)
    assert [batch["total_tokens"] for batch in batches[:2]] == [1_250_000_008, 1_250_000_016]
    ids = np.concatenate([batch["input_ids"].ravel().numpy() for batch in batches])
    rest = [
        [*TEXTS[number].encode(), END] for number in np.flatnonzero(~np.load(folder / "seen.npy"))
    ]
    assert ids.tolist() == [token for document in rest for token in document][: len(ids)]
    assert sum(map(len, rest)) - len(ids) < 8, "but for what fills no sample"


@pytest.mark.parametrize(
    ("shuffle_algo", "canonical", "first_nodes", "nodes"),
    [
        ("py1e", 1, 1, 1),
        ("py1e", 4, 2, 4),
        ("py1s", 8, 1, 2),
        ("py2s", 4, 2, 4),
        ("naive", 2, 2, 2),
    ],
)
def test_the_samples_that_all_ranks_of_a_job_had_read_are_known(
    folder: Path, shuffle_algo: str, canonical: int, first_nodes: int, nodes: int
) -> None:
    ranks, workers, batch_size, batches = 2, 3, 2, 4
    arguments = {"shuffle": True, "shuffle_algo": shuffle_algo, "batch_size": batch_size}
    base = mosaic().base
    dataset = base.StreamingDataset(
        local=str(folder / "mds"), num_canonical_nodes=canonical, **arguments
    )
    dataset._set_shuffle_block_size(base.world.World(first_nodes, ranks, workers, 0))
    work = base.batching.generate_work(
        "random", dataset, base.world.World(first_nodes, ranks, workers, 0), 5, 0
    )
    # A rank takes a batch of each of its workers in turn.
    by_rank = work.transpose(0, 1, 3, 2, 4).reshape(first_nodes, ranks, -1, batch_size)
    taken = by_rank[:, :, :batches].ravel()

    state = {
        **STATE,
        "epoch": 5,
        "sample_in_epoch": taken.size,
        "num_canonical_nodes": canonical,
        "initial_physical_nodes": first_nodes,
    }
    seen = mosaic_flags(state, folder / "mds", arguments)
    assert np.flatnonzero(seen).tolist() == sorted(taken.tolist())
    # On as many nodes as the next launch has, the library would read the others.
    rest = base.batching.generate_work(
        "random", dataset, base.world.World(nodes, ranks, workers, 0), 5, taken.size
    )
    assert {*rest.ravel().tolist()} - {-1} == {*np.flatnonzero(~seen).tolist()}


def test_an_epoch_of_which_all_was_read_has_nothing_left(folder: Path) -> None:
    assert mosaic_flags({**STATE, "sample_in_epoch": 104}, folder / "mds", {}).all()
    assert (~mosaic_flags({**STATE, "sample_in_epoch": 102}, folder / "mds", {})).sum() == 1


@pytest.mark.parametrize(
    ("state", "more", "reason"),
    [
        ({}, ["--argument", "epoch_size=50"], "an epoch is not each of the 103 samples once"),
        (
            {},
            ["--argument", "batching_method=no"],
            "mosaic does not resume from 'state.json': ValueError",
        ),
        ({}, ["--argument", "shuffle"], "--argument: found 'shuffle'; expected NAME=VALUE"),
        (
            {"num_canonical_nodes": 2, "initial_physical_nodes": 2},
            [],
            "35 is no multiple of the 2 nodes",
        ),
        (
            {"num_canonical_nodes": 3, "initial_physical_nodes": 2},
            [],
            "does not resume.*evenly divisible",
        ),
        ({"sample_in_epoch": None}, [], "does not resume.*TypeError"),
    ],
)
def test_a_state_that_does_not_say_what_is_left_is_refused(
    folder: Path, state: dict[str, Any], more: list[str], reason: str
) -> None:
    (folder / "state.json").write_text(json.dumps(STATE | state))

    printed = " ".join(
        invoke(
            folder, "mosaic", "state.json", "mds:mds:text", "--output", "seen.npy", *more
        ).split()
    )
    assert printed.startswith("ConfigError: ")
    assert re.search(reason, printed), printed


def test_a_library_that_is_not_here_is_named_with_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "state.json").write_text(json.dumps(STATE))
    monkeypatch.setitem(sys.modules, "streaming.base", None)

    assert "pip install 'mosaicml-streaming<0.14'" in invoke(
        folder, "mosaic", "state.json", "mds:mds:text", "--output", "seen.npy"
    )


@pytest.mark.parametrize("release", ["0.14.0.dev0", "0.14", "1.0"])
def test_a_release_whose_private_parts_nobody_has_looked_at_is_refused(
    release: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "state.json").write_text(json.dumps(STATE))
    monkeypatch.setattr("tokenloom_tools.moving.version", lambda _: release)

    assert f"those of mosaicml-streaming {release} were not looked at: pip install" in invoke(
        folder, "mosaic", "state.json", "mds:mds:text", "--output", "seen.npy"
    )


def test_a_state_without_a_field_is_refused_by_its_name(folder: Path) -> None:
    (folder / "state.json").write_text("{}")

    assert "the state has no 'epoch'" in invoke(
        folder, "mosaic", "state.json", "mds:mds:text", "--output", "seen.npy"
    )


# --- LitData ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def optimised(folder: Path) -> Path:
    """A folder that LitData wrote, of samples with a text."""
    from litdata import optimize

    optimize(
        fn=_sample,
        inputs=list(range(SAMPLES)),
        output_dir=str(folder / "optimised"),
        chunk_size=10,
        num_workers=1,
        start_method="fork",
    )
    return folder


def _sample(number: int) -> dict[str, str]:
    return {"text": TEXTS[number]}


@contextmanager
def patched_ranks(ranks: int) -> Iterator[None]:
    """What the library takes for the ranks of its own process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(ranks))
        yield


class LitRank:
    """A rank of a job, in its second epoch; ``state``: where it goes on in that."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        *,
        workers: int = 0,
        state: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.utilities.env import _DistributedEnv

        dataset = StreamingDataset(
            str(folder / "optimised"), seed=7, drop_last=ranks > 1 and state is None, **arguments
        )
        dataset.distributed_env = _DistributedEnv(ranks, rank, 1)
        self.loader = StreamingDataLoader(dataset, batch_size=4, num_workers=workers)
        if state is None:
            list(self.loader)
        else:
            with patched_ranks(ranks):
                self.loader.load_state_dict(state)
        self._running = iter(self.loader)

    def read(self, batches: int | None = None) -> list[int]:
        taken = islice(self._running, batches)
        return [number_of(text) for batch in taken for text in batch["text"]]


@pytest.mark.parametrize(
    ("ranks", "batches", "shuffle"),
    [(1, 6, True), (1, 25, False), (2, 1, True), (2, 9, True), (2, 9, False)],
)
def test_what_litdata_had_not_read_on_any_rank_is_read_here(
    optimised: Path, ranks: int, batches: int, shuffle: bool
) -> None:
    job = [LitRank(optimised, rank, ranks, shuffle=shuffle) for rank in range(ranks)]
    seen = [number for rank in job for number in rank.read(batches)]
    (optimised / "state.json").write_text(json.dumps(job[0].loader.state_dict()))
    rest = [number for rank in job for number in rank.read()]
    assert len(seen) == ranks * batches * 4
    assert not {*seen} & {*rest}

    source = invoke(
        optimised, "litdata", "state.json", "litdata:optimised:text", "--output", "seen.npy"
    )
    dropped = SAMPLES - len(seen) - len(rest)
    assert (
        f"# {len(seen)} of {SAMPLES} samples of the epoch were read, and {len(rest)} are left"
        in source
    )
    assert (f"# {dropped} are in no batch of this epoch: litdata drops" in source) == (dropped > 0)
    read = list(read_here(optimised, source))
    assert sorted(number for epoch, number in read if epoch == 0) == sorted(rest)
    assert sorted(number for epoch, number in read if epoch == 1) == list(range(SAMPLES))


def test_what_workers_had_read_is_known(optimised: Path) -> None:
    rank = LitRank(optimised, 0, 1, workers=2, shuffle=True)
    seen = rank.read(5)
    state = json.loads(json.dumps(rank.loader.state_dict()))

    flags = litdata_flags(state, optimised / "optimised", {}) > 0
    assert sorted(seen) == np.flatnonzero(flags).tolist()
    assert sorted(rank.read()) == np.flatnonzero(~flags).tolist()


def test_a_job_that_had_gone_on_with_more_ranks_moves_too(optimised: Path) -> None:
    first = LitRank(optimised, 0, 1, shuffle=True)
    seen = first.read(6)
    state = first.loader.state_dict()
    job = [LitRank(optimised, rank, 2, state=deepcopy(state), shuffle=True) for rank in range(2)]
    seen += [number for rank in job for number in rank.read(3)]

    state = json.loads(json.dumps(job[0].loader.state_dict()))

    flags = litdata_flags(state, optimised / "optimised", {}) > 0
    assert sorted(seen) == np.flatnonzero(flags).tolist()
    assert {number for rank in job for number in rank.read()} <= {*np.flatnonzero(~flags).tolist()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sample_in_epoch": 104}, "104 lies within the last batches of the epoch"),
        ({"item_loader": {"block_size": 2048}}, "TokensLoader reads blocks of 2048 ids"),
        ({"subsampled_files": ["chunk-0-0.bin"]}, "the job read other chunks than lie here"),
        ({"current_epoch": None}, "litdata does not resume from 'state.json'"),
    ],
)
def test_a_state_of_litdata_that_does_not_say_what_is_left_is_refused(
    optimised: Path, change: dict[str, Any], reason: str
) -> None:
    state = LitRank(optimised, 0, 1, shuffle=True).loader.state_dict()["dataset"]
    (optimised / "state.json").write_text(json.dumps(state | change))

    printed = invoke(
        optimised, "litdata", "state.json", "litdata:optimised:text", "--output", "seen.npy"
    )
    assert reason in " ".join(printed.split())

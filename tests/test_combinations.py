"""Every scheme, read in every order, packed in every way: a run goes on identically from every sample index."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import yaml
from support.corpora import (
    VOCAB,
    decode_state,
    encode_state,
    id_rows,
    mixture,
    order_of,
    text_rows,
    write_arrow,
    write_jsonl,
    write_megatron,
    write_npy,
    write_parquet,
    write_txt,
)
from support.litdata_files import write_litdata
from support.megatron_core import FOLDER as MEGATRON
from support.megatron_core import GIVEN as MEGATRON_GIVEN
from support.mosaic import write_mds
from support.server_process import ServerProcess
from support.sources import opened
from tokenloom import LocalDataset, RemoteDataset
from tokenloom_server.core.state import State
from tokenloom_server.errors import SourceError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.sources import columns
from tokenloom_server.sources.catalog import BUILT_IN

#: Three shards of each source.
IDS = [id_rows(9, 1, 40), [[], *id_rows(7, 2, 60)], id_rows(8, 3, 30)]
TEXTS = [text_rows(9, 4, 9), ["", *text_rows(7, 5, 12)], text_rows(8, 6, 6)]
#: How many samples behind each index are compared, with the states behind them.
AHEAD = 3
#: Every so many indices the whole rest is.
WHOLE_EVERY = 23


def _parquet(folder: Path) -> str:
    for shard, rows in enumerate(IDS):
        write_parquet(folder / f"{shard}.parquet", rows)
    return "parquet:*.parquet:ids"


def _jsonl(folder: Path) -> str:
    for shard, rows in enumerate(TEXTS):
        write_jsonl(folder / f"{shard}.jsonl", rows)
    return "jsonl:*.jsonl:text"


def _txt(folder: Path) -> str:
    for shard, rows in enumerate(TEXTS):
        write_txt(folder / f"{shard}.txt", rows)
    return "txt:*.txt:text"


def _paragraphs(folder: Path) -> str:
    for shard, rows in enumerate(TEXTS):
        (folder / f"{shard}.txt").write_text("\n\n".join(rows), encoding="utf-8")
    return "txt:*.txt:paragraph"


def _arrow(folder: Path) -> str:
    write_arrow(folder / "saved", [row for rows in IDS for row in rows])
    return "arrow:saved:ids"


def _megatron(folder: Path) -> str:
    for shard, rows in enumerate(IDS):
        write_megatron(folder / f"owned-{shard}", rows)
    return "megatron:owned-*"


def _megatron_samples(folder: Path) -> str:
    shutil.copytree(MEGATRON, folder, dirs_exist_ok=True)
    return f"megatron-samples:{MEGATRON_GIVEN['prose']}"


def _npy(folder: Path) -> str:
    for shard, rows in enumerate(IDS):
        write_npy(folder / f"{shard}.npy", rows)
    return "npy:*.npy"


def _mds(folder: Path) -> str:
    rows = [np.array(row, np.uint16).tobytes() for rows in IDS for row in rows]
    write_mds(folder / "streamed", {"ids": "bytes"}, [{"ids": row} for row in rows], size_limit=800)
    return "mds:streamed:ids:uint16"


def _litdata(folder: Path) -> str:
    rows = (np.array(row, np.uint16) for rows in IDS for row in rows)
    write_litdata(folder / "optimised", rows, tokens=True, chunk_size=400)
    return "litdata:optimised"


def _gzip(folder: Path) -> str:
    for shard, rows in enumerate(TEXTS):
        content = "".join(json.dumps({"meta": {"text": row}}) + "\n" for row in rows)
        (folder / f"{shard}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    return "jsonl:*.jsonl.gz:meta.text"


def _remote(folder: Path) -> str:
    written = fsspec.filesystem("memory")
    place = f"/{folder.name}-{uuid.uuid4().hex}"
    for shard, rows in enumerate(IDS):
        write_parquet(folder / "local.parquet", rows)
        written.pipe(f"{place}/{shard}.parquet", (folder / "local.parquet").read_bytes())
    return f"parquet:memory:/{place}/*.parquet:ids"


#: Makes the files of a source below a folder, and returns its spec.
SCHEMES: dict[str, Callable[[Path], str]] = {
    "parquet": _parquet,
    "jsonl": _jsonl,
    "txt": _txt,
    "paragraphs": _paragraphs,
    "arrow": _arrow,
    "megatron": _megatron,
    "megatron-samples": _megatron_samples,
    "npy": _npy,
    "mds": _mds,
    "litdata": _litdata,
    "gzip": _gzip,
    "remote": _remote,
}
#: Options of the source.
SHUFFLES: dict[str, dict[str, Any]] = {
    "in file order": {},
    "files": {"shuffle": "shards"},
    "rows": {"shuffle": "rows", "shuffle_window_rows": 7},
    "lanes": {"lanes": 3},
    "rows in lanes": {"shuffle": "rows", "shuffle_window_rows": 7, "lanes": 3},
}
#: Options of the run.
PACKINGS: dict[str, dict[str, Any]] = {
    "concat": {},
    "concat, shifted": {"labels": "shifted"},
    "concat, tail padded": {"labels": "shifted", "tail": "pad", "padding": "left"},
    "best fit": {"packing": "best_fit"},
    "best fit, shifted, in windows": {
        "packing": "best_fit",
        "pack_window_rows": 5,
        "labels": "shifted",
    },
    "unpacked": {"packing": "none"},
    "unpacked, split": {"packing": "none", "long_rows": "split", "padding": "left"},
}


def test_no_scheme_is_left_out() -> None:
    # What the Hub has are files of these.
    assert {scheme.name for scheme in BUILT_IN} - {"hf"} <= set(SCHEMES)


def taken(
    order: PipelineFactory, state: State, limit: int | None = None
) -> tuple[list[bytes], list[State], str | None]:
    """The samples from a state on as they travel, the state behind each, and why they ended."""
    pipeline = order.pipeline(state)
    plan = BatchPlan(
        start_index=state.sample_index,
        world_size=1,
        batch_size=1,
        group_micro_steps=limit or 10_000,
    )
    group = pipeline.begin_group(plan)
    while pipeline.ended is None and len(group.marks) < plan.group_micro_steps:
        pipeline.fill(group, limit or 64)
    steps = len(group.marks)
    ids = [bytes(sample) for sample in group.ids(0, 0, steps)]
    return ids, [group.state_after(step) for step in range(steps)], pipeline.ended


def goes_on_from_every_sample_index(folder: Path, spec: str, shuffle: str, packing: str) -> None:
    source = {"source": spec, "epochs": 1.5, **SHUFFLES[shuffle]}
    root = {"policy": "sequential", "children": [source]}
    order = order_of(folder, mixture(mixture=root, **PACKINGS[packing]))
    samples, states, ended = taken(order, order.initial())
    assert len(samples) > 30
    assert ended == "every source is exhausted"
    assert {state.sources[0].epoch for state in states} == {0, 1}
    for at, state in enumerate([order.initial(), *states[:-1]]):
        written = encode_state(order, state)
        again = decode_state(order, written)
        assert again == state
        assert json.loads(written)["sample_index"] == at
        limit = None if at % WHOLE_EVERY == 0 else AHEAD
        rest, rest_states, _ = taken(order, again, limit)
        assert rest == samples[at:][: limit or len(samples)]
        assert rest_states == states[at:][: limit or len(states)]


#: Of all combinations so many that every shuffle is with every scheme and with every packing.
PAIRS = [
    (scheme, shuffle, list(PACKINGS)[(i + j) % len(PACKINGS)])
    for i, scheme in enumerate(SCHEMES)
    for j, shuffle in enumerate(SHUFFLES)
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """A folder with the files of a source of a scheme, written when they are first wanted, and its spec."""

    def write(scheme: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(scheme)
        return folder, SCHEMES[scheme](folder)

    return cache(write)


@pytest.mark.parametrize(("scheme", "shuffle", "packing"), PAIRS)
def test_a_run_goes_on_from_every_sample_index(
    scheme: str, shuffle: str, packing: str, written: Callable[[str], tuple[Path, str]]
) -> None:
    goes_on_from_every_sample_index(*written(scheme), shuffle, packing)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_goes_on_from_every_sample_index_in_every_combination(
    scheme: str, shuffle: str, written: Callable[[str], tuple[Path, str]]
) -> None:
    for packing in PACKINGS:
        goes_on_from_every_sample_index(*written(scheme), shuffle, packing)


@contextmanager
def _served(file: Path) -> Iterator[RemoteDataset]:
    server = ServerProcess(file.parent, file).start()
    try:
        with RemoteDataset(server.url("test"), 1, rank=0, world_size=1) as dataset:
            yield dataset
    finally:
        server.terminate()


@contextmanager
def _in_job(file: Path) -> Iterator[RemoteDataset]:
    with RemoteDataset(file, 1, rank=0, world_size=1) as dataset:
        yield dataset


@contextmanager
def _in_process(file: Path) -> Iterator[LocalDataset]:
    with LocalDataset(file, 1) as dataset:
        yield dataset


@pytest.mark.parametrize("entry", [_served, _in_job, _in_process])
def test_every_entry_reads_every_scheme(
    entry: Callable[[Path], AbstractContextManager[RemoteDataset | LocalDataset]], tmp_path: Path
) -> None:
    """What a server is handed where it is started leaves none out."""
    # A process's memory is its own; this one names files beside the mixture file.
    children = [{"source": SCHEMES["megatron-samples"](tmp_path), "alias": "samples"}]
    for name in sorted(SCHEMES.keys() - {"remote", "megatron-samples"}):
        (tmp_path / name).mkdir()
        scheme, _, place = SCHEMES[name](tmp_path / name).partition(":")
        children.append({"source": f"{scheme}:{name}/{place}", "alias": name})
    document = mixture(mixture={"policy": "round_robin", "children": children})
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    order = order_of(tmp_path, document)
    expected, _, _ = taken(order, order.initial(), 64)

    with entry(tmp_path / "test.yaml") as dataset:
        batches = itertools.islice(dataset, len(expected))
        samples = [batch["input_ids"].numpy().astype("<u2").tobytes() for batch in batches]

    assert samples == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_has_one_bound_in_all_formats_from_wherever_it_is_read(
    scheme: str, written: Callable[[str], tuple[Path, str]]
) -> None:
    folder, spec = written(scheme)
    whole = opened(folder, spec, end=VOCAB - 2)
    sizes = [
        [size for rows in whole.read(shard, 0) for size in columns.byte_sizes(rows.column).tolist()]
        for shard in range(len(whole.shards))
    ]
    longest = max(max(each, default=0) for each in sizes)
    shard = next(shard for shard, each in enumerate(sizes) if longest in each)
    last = sizes[shard].index(longest)
    source = opened(folder, spec, end=VOCAB - 2, most_bytes=longest - 1, skip_bad=True)
    for row in range(last + 1):
        reached = row
        with pytest.raises(SourceError, match=rf"row {last} has {longest} bytes, .*max_row_mib"):
            for rows in source.read(shard, row):
                reached += len(rows.column)
        assert reached == last

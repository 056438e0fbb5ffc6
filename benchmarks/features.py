"""Batches of latents [4, 64, 64] of float16: MB per CPU-second, of both ends.

    python -m benchmarks.features --runs 3 --seconds 5

Two ranks read from one server over loopback, global batches of 32 from two buckets, with a caption a row, page cache
warm. MB are 10^6 bytes of latents that arrived as tensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from tokenloom import LaunchOptions, RemoteDataset

from benchmarks.processes import Board, Processes, serve
from benchmarks.results import Figures, Result, Row, show

SHAPE = (4, 64, 64)
ROWS = 8192
GLOBAL_BATCH = 32
RANKS = 2
WARM_UP_STEPS = 60
FORMS = ("arrow", "arrow of nested lists", "parquet")
COLUMNS = {
    "MB/CPU-s": "MB/CPU-s",
    "server CPU-s/GB": "server CPU-s/GB",
    "client CPU-s/GB": "client CPU-s/GB",
    "MB/s": "MB/s",
    "server PSS MB": "server PSS MB",
    "anon. MB": "server anonymous MB",
}


def write(folder: Path, form: str) -> str:
    """The data in a form; returns its spec."""
    size = int(np.prod(SHAPE))
    rng = np.random.default_rng(0)
    flat = pa.array(rng.standard_normal(ROWS * size // 64).astype(np.float16))
    flat = pa.concat_arrays([flat] * 64)
    latents: pa.Array = pa.FixedSizeListArray.from_arrays(flat, size)
    if form == "arrow":
        latents = pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float16(), SHAPE), latents
        )
    else:
        for length in reversed(SHAPE):
            flat = pa.ListArray.from_arrays(
                np.arange(0, len(flat) + 1, length, dtype=np.int32), flat
            )
        latents = flat
    columns = {"latent": latents, "bucket_of": ["a", "b", "b"] * (ROWS // 3) + ["a"] * (ROWS % 3)}
    table = pa.table(columns | {"caption": [f"a picture of {i} things" for i in range(ROWS)]})
    if form == "parquet":
        pq.write_table(table, folder / "latents.parquet", row_group_size=512)
        return "parquet:latents.parquet:*"
    (folder / "latents").mkdir()
    with (
        pa.OSFile(str(folder / "latents" / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=1000)
    (folder / "latents" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return "arrow:latents:*"


def measure(form: str, seconds: float) -> Figures:
    """One run: new data, a new server, two new ranks, their steady state."""
    with Processes(RANKS) as processes:
        source = {"source": write(processes.folder, form), "epochs": float("inf")}
        document = {
            "run": "latents",
            "batching": {"bucket_by": "bucket_of", "columns": ["latent", "caption"]},
            "global_batch_size": GLOBAL_BATCH,
            "mixture": {"policy": "weighted", "children": [source]},
        }
        path = processes.folder / "latents.yaml"
        path.write_text(yaml.safe_dump(document))
        served = serve(processes, path)
        for rank in range(RANKS):
            command = [
                sys.executable,
                "-m",
                "benchmarks.features",
                "--take",
                f"grpc://{served.grpc}/latents",
            ]
            processes.start(
                "client", [*command, "--rank", str(rank), "--board", str(processes.board.path)]
            )
        window = processes.window(WARM_UP_STEPS, seconds)
        memory, anonymous = window.memory_mb["server"]
        return {
            "MB/CPU-s": window.tokens_per_cpu_s / 1e6,
            "server CPU-s/GB": window.ns_per_token("server"),
            "client CPU-s/GB": window.ns_per_token("client"),
            "MB/s": window.tokens / window.seconds / 1e6,
            "server PSS MB": memory,
            "server anonymous MB": anonymous,
        }


def take(url: str, rank: int, board: Path) -> None:
    """A rank that takes batches until it is ended; the board counts bytes as tokens."""
    torch.set_num_threads(1)
    cells = np.memmap(board, np.int64, "r+").reshape(-1, 3)[rank]
    for batch in RemoteDataset(
        url, rank=rank, world_size=RANKS, launch=LaunchOptions(attempt="bench")
    ):
        latent: torch.Tensor = batch["latent"]  # type: ignore[typeddict-item]
        assert latent.shape[1:] == SHAPE
        cells[Board.TOKENS] += latent.nbytes
        cells[Board.STEPS] += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--form", choices=FORMS, action="append", help="of the data; all if not given"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each form; medians are shown (default 3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="steady state per run (default 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--take", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--board", type=Path, default=Path(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        take(options.take, options.rank, options.board)
        return
    result = Result.begin(
        "features",
        f"latents {list(SHAPE)} of float16, {RANKS} ranks, global batches of {GLOBAL_BATCH}",
    )
    result.rows += [Row(name=form) for form in options.form or FORMS]
    for _ in range(options.runs):
        for row in result.rows:
            row.runs.append(measure(row.name, options.seconds))
    show(result, COLUMNS)
    if options.json:
        result.save(options.json)


if __name__ == "__main__":
    main()

"""Sources of rows that are ready tensors, and runs of them; made from integers alone, so that digests can be pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from tokenloom_server.config import mixture_file as config
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory

from support.catalog import CATALOG
from support.corpora import numbers

#: Latents of one of these shapes, by bucket.
SHAPES = {"square": (2, 2, 2), "tall": (2, 4, 2), "wide": (2, 2, 4)}
LATENTS = "parquet:latents/*.parquet:*"
MORE = "arrow:more:*"


def latents(rows: int, salt: int) -> pa.Table:
    """``rows`` of latents as nested lists of float16, in buckets that are not equally large."""
    names = ["square", "square", "square", "tall", "tall", "wide"]
    aspects = [names[number] for number in numbers(rows, salt, 0, len(names))]
    values = [
        np.array(numbers(int(np.prod(SHAPES[aspect])), salt + i, 0, 1000), np.float16)
        .reshape(SHAPES[aspect])
        .tolist()
        for i, aspect in enumerate(aspects)
    ]
    return pa.table(
        {
            "latent": pa.array(values, pa.list_(pa.list_(pa.list_(pa.float16())))),
            "aspect": aspects,
            "caption": [f"picture {salt}/{i}" for i in range(rows)],
            "row": np.arange(rows),
        }
    )


def write_arrow(folder: Path, table: pa.Table, batch_rows: int = 5) -> None:
    """As `datasets` writes a ``save_to_disk`` folder."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "data-00000-of-00001.arrow"
    with (
        pa.OSFile(str(folder / name), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=batch_rows)
    (folder / "state.json").write_text(f'{{"_data_files": [{{"filename": "{name}"}}]}}')


def write_features(folder: Path) -> None:
    """``LATENTS`` in two files of several row groups, and ``MORE``."""
    (folder / "latents").mkdir(parents=True, exist_ok=True)
    pq.write_table(latents(37, 1), folder / "latents" / "0.parquet", row_group_size=7)
    pq.write_table(latents(24, 1000), folder / "latents" / "1.parquet", row_group_size=10)
    write_arrow(folder / "more", latents(29, 2000))


def document(**fields: Any) -> dict[str, Any]:
    """A mixture file of both sources."""
    return {
        "run": "latents",
        "seed": 5,
        "batching": {"bucket_by": "aspect"},
        "global_batch_size": 4,
        "mixture": {
            "policy": "least_consumed",
            "children": [{"source": LATENTS, "weight": 2, "epochs": 2}, {"source": MORE}],
        },
    } | fields


def order_of(folder: Path, found: dict[str, Any]) -> PipelineFactory:
    return builder.create(
        config.parse(found, where="test", catalog=CATALOG), folder, folder / "index"
    )


def write_mixture(folder: Path, found: dict[str, Any]) -> Path:
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(found))
    return path

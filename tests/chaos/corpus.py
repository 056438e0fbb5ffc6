"""A corpus whose tokens are numbered: each id says which source it is of, and where in it it stands.

So a checker that has nothing but tensors can tell which token of which row came when, and a token that is lost,
repeated or out of place cannot hide. The corpus is read for ever (``epochs: .inf``).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray
from support.corpora import write_arrow

from chaos.records import LENGTH

#: Ends each row; it is no number.
END = 0
#: Ids of one source lie this far from those of the next.
APART = 2**17
#: Steps that may be produced ahead of the committed one: few, so that a ledger that is away is felt soon.
WINDOW_STEPS = 8


@dataclass(frozen=True)
class NumberedSource:
    """``rows`` rows of up to ``longest`` tokens each, whose ids count from ``first_id`` on."""

    spec: str
    alias: str
    number: int
    rows: int
    longest: int

    @property
    def first_id(self) -> int:
        return 1 + self.number * APART

    def row_lengths(self) -> list[int]:
        draw = random.Random(f"rows of {self.alias}")
        return [draw.randint(1, self.longest) for _ in range(self.rows)]

    def row_ids(self) -> list[list[int]]:
        """The rows: the ids of all of them together count up by one."""
        rows, begin = [], self.first_id
        for length in self.row_lengths():
            rows.append(list(range(begin, begin + length)))
            begin += length
        return rows

    def epoch(self) -> NDArray[np.uint32]:
        """All that one epoch trains on, in order: each row, and an end behind it."""
        return np.concatenate([np.array([*row, END], np.uint32) for row in self.row_ids()])


#: By source id. Row counts share no factor with each other nor with a sample's length.
SOURCES = (
    NumberedSource("parquet:data/code-*.parquet:ids", "code", 0, 1201, 60),
    NumberedSource("jsonl:data/docs.jsonl:ids", "docs", 1, 701, 25),
    NumberedSource("arrow:data/wiki:ids", "wiki", 2, 907, 40),
    NumberedSource("parquet:data/long.parquet:ids", "long", 3, 53, 900),
)


def write_corpus(folder: Path) -> Path:
    """All sources below ``folder/data``."""
    data = folder / "data"
    data.mkdir(parents=True)
    code, docs, wiki, long = (source.row_ids() for source in SOURCES)
    for shard, rows in enumerate((code[:500], code[500:503], code[503:])):
        _write_parquet(data / f"code-{shard}.parquet", rows)
    (data / "docs.jsonl").write_text(
        "".join(json.dumps({"ids": row}) + "\n" for row in docs), encoding="utf-8"
    )
    write_arrow(data / "wiki", wiki)
    _write_parquet(data / "long.parquet", long)
    return folder


def _write_parquet(path: Path, rows: Sequence[Sequence[int]]) -> None:
    pq.write_table(
        pa.table({"ids": pa.array(rows, pa.list_(pa.uint32()))}), path, row_group_size=64
    )


def write_mixture(path: Path, run: str, seed: int) -> Path:
    """A mixture file in the corpus's folder: a tree of two levels and both policies."""
    code, docs, wiki, long = (
        {"source": each.spec, "alias": each.alias, "epochs": float("inf")} for each in SOURCES
    )
    document: dict[str, Any] = {
        "run": run,
        "seed": seed,
        "vocab_size": 1 + len(SOURCES) * APART,
        "end_of_text_id": END,
        "sequence_length": LENGTH,
        "packing": "concat",
        "window_micro_steps": WINDOW_STEPS,
        "mixture": {
            "policy": "least_consumed",
            "children": [
                code | {"weight": 2},
                docs,
                {
                    "policy": "weighted",
                    "alias": "rest",
                    "children": [wiki | {"weight": 0.7}, long | {"weight": 0.3}],
                },
            ],
        },
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path

"""Small corpora for tests of the core, made by code from integers alone: no library decides a token of them."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import State
from tokenloom_server.mixing.policies import policies
from tokenloom_server.order import builder, snapshot, snapshot_encode
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline

from support.catalog import CATALOG

#: One of each scheme; between them empty rows, a null, several shards, rows longer than a sample.
CODE = "parquet:data/code-*.parquet:ids"
DOCS = "jsonl:data/docs.jsonl:text"
PROSE = "txt:data/prose/*.txt:text"
WIKI = "arrow:data/wiki:ids"

#: Greatest id + 1 of the `bytes` tokeniser, in which all four live.
VOCAB = 258


def numbers(count: int, salt: int, low: int, high: int) -> list[int]:
    """``count`` integers in [low, high): a linear congruence, the same for ever."""
    found, x = [], (salt * 2654435761 + 12345) % 2**32
    for _ in range(count):
        x = (x * 1664525 + 1013904223) % 2**32
        found.append(low + (x >> 8) % (high - low))
    return found


def id_rows(rows: int, salt: int, longest: int) -> list[list[int]]:
    """Rows of ids below 256; about one in ``longest`` is empty."""
    return [
        numbers(length, salt + 1000 + i, 0, 256)
        for i, length in enumerate(numbers(rows, salt, 0, longest))
    ]


def text_rows(rows: int, salt: int, longest: int) -> list[str]:
    """Rows of digits and spaces, so that text is made of integers, too."""
    lengths = numbers(rows, salt, 0, longest)
    return [
        " ".join(map(str, numbers(length, salt + 1000 + i, 0, 100)))
        for i, length in enumerate(lengths)
    ]


def write_parquet(path: Path, rows: Sequence[Sequence[int] | None], group: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"ids": pa.array(rows, pa.list_(pa.uint16()))}), path, row_group_size=group
    )


def write_jsonl(path: Path, rows: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")


def write_txt(path: Path, rows: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")


def write_arrow(folder: Path, rows: Sequence[Sequence[int]]) -> None:
    """A ``save_to_disk`` folder of `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"ids": datasets.Sequence(datasets.Value("int32"))})
    datasets.Dataset.from_dict(
        {"ids": [list(row) for row in rows]}, features=features
    ).save_to_disk(folder)


def write_megatron(prefix: Path, rows: Sequence[Sequence[int]]) -> None:
    """An indexed dataset of Megatron-LM: each row a document of one sequence."""
    lengths = np.array([len(row) for row in rows], np.int32)
    np.concatenate([np.array(row, np.uint16) for row in rows]).tofile(f"{prefix}.bin")
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(rows), len(rows) + 1))
        file.write(lengths.tobytes())
        file.write(((np.cumsum(lengths) - lengths) * 2).astype(np.int64).tobytes())
        file.write(np.arange(len(rows) + 1, dtype=np.int64).tobytes())


def write_npy(path: Path, rows: Sequence[Sequence[int]], end: int = VOCAB - 2) -> None:
    """A flat array, each row with the end-of-text id of the `bytes` tokeniser."""
    np.save(path, np.concatenate([np.array([*row, end], np.uint16) for row in rows]))


#: The rows of ``write_corpus``, by spec, shard by shard.
ROWS: dict[str, list[list[Any]]] = {
    CODE: [id_rows(14, 1, 40), [None, *id_rows(11, 2, 60)]],
    DOCS: [text_rows(9, 3, 8)],
    PROSE: [text_rows(12, 4, 9), text_rows(10, 5, 12)],
    WIKI: [id_rows(20, 6, 30)],
}


def write_corpus(folder: Path) -> Path:
    """Four sources of four schemes below ``folder/data``."""
    for shard, rows in enumerate(ROWS[CODE]):
        write_parquet(folder / f"data/code-{shard}.parquet", rows)
    write_jsonl(folder / "data/docs.jsonl", ROWS[DOCS][0])
    for shard, rows in enumerate(ROWS[PROSE]):
        write_txt(folder / f"data/prose/{shard}.txt", rows)
    write_arrow(folder / "data/wiki", ROWS[WIKI][0])
    return folder


def mixture(**fields: Any) -> dict[str, Any]:
    """A mixture file over the corpus: nested, two epochs of the smallest, exhaustions on the way."""
    document: dict[str, Any] = {
        "run": "test",
        "seed": 7,
        "tokenizer": "bytes",
        "sequence_length": 8,
        "mixture": {
            "policy": "least_consumed",
            "children": [
                {"source": CODE, "alias": "code", "weight": 2},
                {"source": DOCS, "alias": "docs", "epochs": 2},
                {
                    "policy": "weighted",
                    "alias": "rest",
                    "weight": 1.5,
                    "children": [{"source": PROSE, "weight": 0.3}, {"source": WIKI, "weight": 0.7}],
                },
            ],
        },
    }
    return copy.deepcopy(document | fields)


def flat(specs: Sequence[str], policy: str = "least_consumed", **fields: Any) -> dict[str, Any]:
    """A mixture file with one node over sources of equal weight."""
    return mixture(
        mixture={"policy": policy, "children": [{"source": spec} for spec in specs]}, **fields
    )


def parsed(document: dict[str, Any]) -> RunConfig:
    return config.parse(document, where="mixture.yaml", catalog=CATALOG)


def order_of(folder: Path, document: dict[str, Any] | None = None) -> PipelineFactory:
    """A new run's order over files below a folder."""
    return builder.create(parsed(document or mixture()), folder, None)


def random_tree(rng: random.Random, depth: int, specs: Iterator[str]) -> dict[str, Any]:
    """A random node: up to ``depth`` levels, every policy and option; limits hold samples of 8 tokens."""
    policy = rng.choice(list(policies()))
    children: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 4)):
        child = (
            random_tree(rng, depth - 1, specs)
            if depth > 1 and rng.random() < 0.35
            else _random_source(rng, specs)
        )
        if policies()[policy].takes != "nothing":
            child["weight"] = rng.choice([1, 1, 2, 0.5, round(rng.uniform(0.01, 9), 3)])
        if policy == "schedule" and children and rng.random() < 0.7:
            child["weight"] = _random_points(rng)
        if rng.random() < 0.1:
            child["max_tokens"] = rng.randint(8, 400)
        if rng.random() < 0.1:
            child["epochs"] = rng.choice([0.5, 2, 3])
        children.append(child)
    node: dict[str, Any] = {
        "policy": policy,
        "on_exhausted": "stop" if rng.random() < 0.15 else "drop",
        "children": children,
    }
    if policy == "schedule" and rng.random() < 0.5:
        node["interpolate"] = "step"
    if policy == "weighted" and rng.random() < 0.5:
        node["unit"] = "samples"
    return node


def _random_source(rng: random.Random, specs: Iterator[str]) -> dict[str, Any]:
    source: dict[str, Any] = {"source": next(specs)}
    if rng.random() < 0.15:
        source["on_exhausted"] = rng.choice(["drop", "stop"])
    return source


def _random_points(rng: random.Random) -> list[list[float]]:
    """Ascending in tokens, some of weight 0."""
    at = sorted(rng.sample(range(2000), rng.randint(1, 4)))
    points: list[list[float]] = [
        [tokens, rng.choice([0, 0, 1, round(rng.uniform(0.01, 9), 2)])] for tokens in at
    ]
    points[rng.randrange(len(points))][1] = 1.5
    return points


def random_presences(rng: random.Random, run: RunConfig, share: float = 0.12) -> RunConfig:
    """The same mixture with some children paused or dropped, as revisions leave it."""

    def visit(node: dict[str, Any]) -> None:
        for child in node["children"]:
            if rng.random() < share:
                child["presence"] = rng.choice(["paused", "dropped"])
            if "children" in child:
                visit(child)

    document = run.model_dump()
    visit(document["mixture"])
    return RunConfig.model_validate(document, context=CATALOG)


def encode_state(order: PipelineFactory, state: State) -> str:
    """``resume_state`` of a run without phases and revisions."""
    return snapshot_encode.encode_state(state, order.record.shape)


def decode_state(order: PipelineFactory, resume_state: str) -> State:
    """Reads ``encode_state`` back."""
    return snapshot.decode_state(resume_state, lambda *_: order.record.shape)


def reread(order: PipelineFactory, state: State) -> State:
    """A state that was written and read again."""
    return decode_state(order, encode_state(order, state))


def advanced(order: PipelineFactory | Timeline, state: State, samples: int) -> State:
    """The state so many samples after another, fewer where the data end."""
    pipeline = order.pipeline(state)
    pipeline.advance(samples)
    return pipeline.state()

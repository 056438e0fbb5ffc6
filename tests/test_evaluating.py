"""Evaluation: the same samples each time, on any ranks, and without a trace in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.corpora import CODE, DOCS, PROSE, WIKI, mixture, write_corpus
from tokenloom import RemoteDataset
from tokenloom_server.grpc_service.server import GrpcServer
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.service import Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("evaluated"))


def held_out(share: float = 0.4, **fields: Any) -> dict[str, Any]:
    """The mixture of the tests, whose sources all hold documents out."""
    document = mixture(**fields)
    for child in document["mixture"]["children"]:
        for source in child.get("children", [child]):
            source["holdout"] = share
    return document


@contextmanager
def serving(folder: Path, ledger: Path, document: dict[str, Any]) -> Iterator[tuple[str, Runs]]:
    path = folder / f"{ledger.parent.name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    opened = SqliteLedger(ledger)
    runs = Runs(opened)
    server = GrpcServer("127.0.0.1:0")
    try:
        runs.add(path, None)
        server.start(runs)
        yield f"grpc://{server.address}/{document['run']}", runs
    finally:
        runs.stop()
        server.stop(1.0)
        opened.close()


def evaluated(
    url: str, world_size: int = 1, batch_size: int = 1, samples: int | None = None, stream: str = "validation"
) -> dict[int, tuple[int, tuple[int, ...]]]:
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    steps = set()
    for rank in range(world_size):
        with RemoteDataset(
            url, batch_size, rank=rank, world_size=world_size, stream=stream, samples=samples
        ) as dataset:
            batches = list(dataset)
            assert len(batches) == len(dataset)
            steps.add(len(batches))
            for batch in batches:
                for at, source, ids, labels in zip(
                    *(batch[name].tolist() for name in ("sample_ids", "source_ids", "input_ids", "labels")), strict=True
                ):
                    if source == -1:
                        assert at == -1 and set(labels) == {-100}
                        continue
                    assert at not in found
                    found[at] = source, tuple(ids)
    assert len(steps) == 1
    return found


def test_it(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "ledger.db", held_out()) as (url, runs):
        whole = evaluated(url)
        print(len(whole), [s for s, _ in whole.values()])
        for world in (1, 2, 3, 4):
            for batch in (1, 2, 5):
                assert evaluated(url, world, batch) == whole
                assert evaluated(url, world, batch, 7) == {i: whole[i] for i in range(7)}
        code = evaluated(url, stream="validation/code")
        print(len(code))

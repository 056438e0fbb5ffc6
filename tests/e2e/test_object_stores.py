"""A run whose corpus lies in an object store: four ranks, one listing, one reader, and an exact restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import StartServer
from support.corpora import CODE, DOCS, PROSE, WIKI, mixture, order_of, write_corpus
from support.s3_server import BUCKET, S3Server, s3_server
from support.trainer import Sample, World
from tokenloom_server.order.steps import BatchPlan

PLACE = f"s3://{BUCKET}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server() as found:
        write_corpus(tmp_path)
        found.put(tmp_path)
        found.requests.clear()
        yield found


def remote_mixture(folder: Path, **fields: Any) -> Path:
    """A mixture file over the uploaded corpus."""
    text = yaml.safe_dump(mixture(**fields))
    for spec in (CODE, DOCS, PROSE, WIKI):
        scheme, rest = spec.split(":", 1)
        text = text.replace(spec, f"{scheme}:{PLACE}/{rest}")
    path = folder / f"{fields.get('run', 'test')}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def local_samples(folder: Path) -> list[Sample]:
    """What the same files give on a disk."""
    order = order_of(folder)
    pipeline = order.pipeline(order.initial())
    group = pipeline.begin_group(
        BatchPlan(start_index=0, world_size=1, batch_size=1, group_micro_steps=10_000)
    )
    pipeline.fill(group, 10_000)
    ids = [
        tuple(memoryview(bytes(sample)).cast("H")) for sample in group.ids(0, 0, len(group.marks))
    ]
    return [
        Sample(source, some)
        for source, some in zip(group.source_ids.ravel().tolist(), ids, strict=False)
    ]


def test_four_ranks_cost_one_listing_and_one_reader_and_resume_exactly(
    store: S3Server, start_server: StartServer, tmp_path: Path
) -> None:
    expected = local_samples(tmp_path)
    files = remote_mixture(tmp_path), remote_mixture(tmp_path, run="alone")
    server = start_server(*files, environment=store.environment)
    assert Counter(request.query.split("&")[1] for request in store.listings()) == {
        "prefix=data%2Fcode-": 2,
        "prefix=data%2Fprose%2F": 2,
        "prefix=data%2Fwiki%2F": 2,
    }
    store.requests.clear()
    with World(server.url("test"), 4) as world:
        state = world.steps(8).state()
        given = world.run().receipt.sequence()
    assert given == expected[: len(given)]
    assert len(expected) - len(given) < 4
    by_four = Counter(store.requests)
    assert store.listings() == []

    store.requests.clear()
    with World(server.url("alone")) as world:
        assert world.run().receipt.sequence() == expected
    # A reader of each rank's own would ask four times. What is late on a busy machine is asked for a second time.
    assert by_four.keys() == set(store.requests)
    assert sum(by_four.values()) < 3 * len(by_four)

    server.kill()
    store.requests.clear()
    server.start()
    assert len(store.listings()) == 6
    with World(server.url("test"), 3, state=state) as world:
        world.steps(5)
        assert world.receipt.sequence(32) == expected[32:47]

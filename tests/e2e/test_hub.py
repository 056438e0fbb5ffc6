"""A dataset on the Hub, served and trained from: exact under everything that a Hub does to its clients."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import StartServer
from support.corpora import id_rows
from support.hub import StandInHub, stand_in_hub
from support.server_process import ServerProcess
from support.trainer import Sample, World

LENGTH, END = 16, 256
SPEC = "hf:org/corpus:train:ids"
TOKEN = "hf_secretsecretsecretsecret"


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        yield hub


def parquet(rows: Sequence[Sequence[int]], group: int = 16) -> bytes:
    file = io.BytesIO()
    pq.write_table(
        pa.table({"ids": pa.array(rows, pa.list_(pa.uint16()))}), file, row_group_size=group
    )
    return file.getvalue()


def shards(salt: int) -> list[list[list[int]]]:
    return [id_rows(60, salt + shard, 40) for shard in range(3)]


def as_files(rows: Sequence[Sequence[Sequence[int]]]) -> dict[str, bytes]:
    return {
        f"data/train-{i:05}-of-{len(rows):05}.parquet": parquet(shard)
        for i, shard in enumerate(rows)
    }


def expected(rows: Sequence[Sequence[Sequence[int]]]) -> list[Sample]:
    stream = [i for shard in rows for row in shard if row for i in (*row, END)]
    return [
        Sample(0, tuple(stream[at : at + LENGTH]))
        for at in range(0, len(stream) - LENGTH + 1, LENGTH)
    ]


def mixture(folder: Path, run: str, **fields: object) -> Path:
    path = folder / f"{run}.yaml"
    document = {
        "run": run,
        "sequence_length": LENGTH,
        "vocab_size": 257,
        "end_of_text_id": END,
        "mixture": {"policy": "least_consumed", "children": [{"source": SPEC}]},
    }
    path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
    return path


def test_a_run_is_exact_over_kills_rate_limits_and_cut_connections(
    hub: StandInHub, tmp_path: Path, start_server: StartServer
) -> None:
    hub.tokens.add(TOKEN)
    repo, rows = hub.repo("org/corpus", private=True), shards(0)
    repo.commit(as_files(rows))
    hub.fail("/blobs/", status=429, headers={"Retry-After": "0"}, times=1e9, every=4)
    hub.fail("/blobs/", cut=100, times=1e9, every=5)
    hub.fail("/resolve/", status=503, times=1e9, every=3)
    hub.fail("/api/", status=500, times=1e9, every=3)
    environment = hub.environment(tmp_path / "hf", HF_TOKEN=TOKEN)
    server = start_server(
        mixture(tmp_path, "hub", window_micro_steps=4),
        environment=environment,
        flags=["--log-level", "debug"],
    )

    with World(server.url("hub"), world_size=2, batch_size=2) as world:
        world.steps(9)
        first, state = world.receipt, world.state()
    server.kill()
    # What the branch has by now is not for this run; nor is it asked.
    repo.commit(as_files(shards(100)))
    hub.forget()
    server.start()
    with World(server.url("hub"), batch_size=3, state=state) as world:
        rest = world.run().receipt
    server.terminate()

    assert len({request.status for request in hub.requests}) > 2, "nothing went wrong"
    assert first.sequence() + rest.sequence(36) == expected(rows)[: 36 + len(rest.samples)]
    assert len(expected(rows)) - 36 - len(rest.samples) < 3
    assert hub.asked("^/api/") == []
    _keeps_its_secrets(hub, server, json.dumps(state))


def _keeps_its_secrets(hub: StandInHub, server: ServerProcess, state: str) -> None:
    """The token came to the Hub, and neither it nor a signature is to be found anywhere."""
    assert {request.headers.get("authorization") for request in hub.asked("")} == {
        f"Bearer {TOKEN}"
    }
    assert {request.headers.get("authorization") for request in hub.asked("", "storage")} == {None}
    for text in (server.log, state, server.ledger_file.read_bytes().decode(errors="replace")):
        assert "hf_secret" not in text
        assert hub.signature not in text

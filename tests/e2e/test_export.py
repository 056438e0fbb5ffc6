"""The way out: any range of a run's order as files that others read, and that this server reads back."""

from __future__ import annotations

import json
import re
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import LENGTH, SPECS, Corpus, StartServer
from support.catalog import spec_of
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World, rolling_digest
from tokenloom_proto.address import Address
from tokenloom_server.errors import BeyondHorizon, ConfigError, OrderMismatch
from tokenloom_server.sources.open import open_source
from tokenloom_tools import peek
from tokenloom_tools.export import export
from tokenloom_tools.peek import SampleRange
from tokenloom_tools.servers import Servers

RUN = "leaving"
#: From one sample within the run to another.
BEGIN, END = 7, 61


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    """A run that is trained up to sample 40."""
    server = serve(corpus.mixture(RUN))
    with World(server.url(RUN), 2, 2) as world:
        world.steps(10)
    return server


def sample_range_of(
    server: ServerProcess, begin: int, end: int | None, run: str = RUN
) -> SampleRange:
    return SampleRange(
        Servers(Address.parse(server.url(run)), {}), begin, end, clock=time.monotonic
    )


def nothing(*_: int) -> None:
    pass


@pytest.mark.parametrize("form", ["megatron", "parquet"])
def test_what_is_exported_is_read_back_and_is_what_trainers_get(
    form: str, server: ServerProcess, sequence: list[Sample], tokenloom: CommandLine, tmp_path: Path
) -> None:
    out = tmp_path / "new folder/range"
    done = tokenloom(
        "peek",
        server.url(RUN),
        "--at",
        BEGIN,
        "--samples",
        END - BEGIN,
        "--out",
        out,
        "--format",
        form,
        folder=tmp_path,
    )
    assert done.status == 0, done.output
    assert f"samples {BEGIN} to {END - 1}, {(END - BEGIN) * LENGTH:,} tokens" in done.output
    assert f"100%  {END - BEGIN} samples" in done.output
    expected = sequence[BEGIN:END]
    spec = f"megatron:{out}" if form == "megatron" else f"parquet:{out}.parquet:ids"
    source = open_source(spec_of(spec), tmp_path)
    rows = [
        row
        for shard in range(len(source.shards))
        for rows in source.read(shard, 0)
        for row in rows.column
    ]
    assert [tuple(row.as_py()) for row in rows] == [sample.ids for sample in expected]
    said = json.loads(out.with_suffix(".json").read_text())
    assert (said["run"], said["from"], said["to"], said["format"]) == (RUN, BEGIN, END, form)
    assert said["digest_before"] == rolling_digest(sequence[:BEGIN])
    assert said["digest_after"] == rolling_digest(sequence[:END])
    assert (said["total_tokens_before"], said["total_tokens_after"]) == (
        BEGIN * LENGTH,
        END * LENGTH,
    )
    assert said["tokens"] == (END - BEGIN) * LENGTH
    assert said["samples_by_source"] == {
        spec: count
        for number, spec in enumerate(SPECS)
        if (count := sum(sample.source == number for sample in expected))
    }
    endings = {"megatron": ["range.bin", "range.idx"], "parquet": ["range.parquet"]}[form]
    assert [file["name"] for file in said["files"]] == endings
    assert {path.name for path in out.parent.iterdir()} == {*endings, "range.json"}


def test_documents_of_a_sample_are_sequences_and_starts(
    server: ServerProcess, corpus: Corpus, sequence: list[Sample], tmp_path: Path
) -> None:
    for form in ("megatron", "parquet"):
        export(sample_range_of(server, BEGIN, END), tmp_path / form, form, nothing)  # type: ignore[arg-type]
    rows = pq.read_table(tmp_path / "parquet.parquet").to_pylist()
    assert [row["sample"] for row in rows] == list(range(BEGIN, END))
    assert [row["source"] for row in rows] == [
        SPECS[sample.source] for sample in sequence[BEGIN:END]
    ]
    header = (tmp_path / "megatron.idx").read_bytes()
    count, edges = np.frombuffer(header, "<u8", 2, 18).tolist()
    lengths = np.frombuffer(header, "<i4", count, 34)
    documents_at = np.frombuffer(header, "<i8", edges, 34 + 12 * count)
    assert any(len(row["starts"]) > 1 for row in rows)
    for i, row in enumerate(rows):
        behind = [
            at + 1
            for at, token in enumerate(row["ids"])
            if token == corpus.end_id and at + 1 < LENGTH
        ]
        assert [start for start in row["starts"] if start] == behind
        assert (
            lengths[documents_at[i] : documents_at[i + 1]].tolist()
            == np.diff([0, *behind, LENGTH]).tolist()
        )


def test_shifted_labels_export_the_id_that_is_only_a_label(
    corpus: Corpus, start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(corpus.mixture("shifted", labels="shifted"))
    export(sample_range_of(server, 3, 9, "shifted"), tmp_path / "range", "parquet", nothing)
    with World(server.url("shifted")) as world:
        world.steps(9)
        batches = world.receipt.sequence()
    ids = pq.read_table(tmp_path / "range.parquet")["ids"].to_pylist()
    assert [tuple(row[:-1]) for row in ids] == [sample.ids for sample in batches[3:9]]
    assert {len(row) for row in ids} == {LENGTH + 1}
    assert json.loads((tmp_path / "range.json").read_text())["labels"] == "shifted"


def test_without_an_end_it_goes_to_where_the_ledger_stands(
    server: ServerProcess, tmp_path: Path
) -> None:
    done = export(sample_range_of(server, 0, None), tmp_path / "range", "parquet", nothing)
    assert (done.begin, done.end) == (0, 40)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    server: ServerProcess, sequence: list[Sample], tokenloom: CommandLine, tmp_path: Path
) -> None:
    beyond = len(sequence) + 5
    with pytest.raises(
        BeyondHorizon, match=rf"sample {len(sequence)} does not exist: every source is exhausted"
    ):
        export(sample_range_of(server, 10, beyond), tmp_path / "range", "megatron", nothing)
    with pytest.raises(ConfigError, match="there is nothing to export"):
        export(sample_range_of(server, 50, None), tmp_path / "range", "megatron", nothing)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "range.idx").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"range\.idx: is there already"):
        export(sample_range_of(server, 0, 5), tmp_path / "range", "megatron", nothing)
    with pytest.raises(ConfigError, match="cannot be written"):
        export(sample_range_of(server, 0, 5), tmp_path / "range.idx" / "range", "megatron", nothing)


def test_a_server_that_goes_away_is_waited_for(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peek, "_MOST_SAMPLES", 4)
    server = start_server(corpus.mixture(RUN))
    samples = sample_range_of(server, 0, 11).samples()
    first = list(islice(samples, 5))
    server.kill()
    server.start()
    found = [*first, *samples]
    assert [tuple(seen.ids.tolist()) for seen in found] == [sample.ids for sample in sequence[:11]]


def test_a_server_of_another_order_ends_it(
    corpus: Corpus, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peek, "_MOST_SAMPLES", 4)
    server = start_server(corpus.mixture(RUN))
    samples = sample_range_of(server, 0, 11).samples()
    assert len(list(islice(samples, 4))) == 4
    server.kill()
    server.ledger_file.unlink()
    corpus.mixture(RUN, seed=8)
    server.start()
    with pytest.raises(OrderMismatch, match=re.escape("at the server that answers now")):
        list(samples)

"""Looking is free: peeks read the run's own order and leave no trace in run or ledger, whatever the run is doing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from conftest import LENGTH, SPECS, Corpus, Rpc, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Receipt, Sample, World, rolling_digest, with_connection
from support.waiting import wait_for
from tokenizers import Tokenizer
from tokenloom import PeekDataset


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    """One with a run for each test."""
    runs = ("watched", "from-a-peek", "shown", "short")
    return serve(*(corpus.mixture(run, window_micro_steps=6) for run in runs))


def peek(url: str, batch_size: int = 1, **options: Any) -> PeekDataset:
    return PeekDataset(url, batch_size, **with_connection(options))


def peeked(
    url: str, batch_size: int = 1, steps: int | None = None, **options: Any
) -> dict[int, Sample]:
    """By sample index, what a peek shows."""
    receipt = Receipt()
    with peek(url, batch_size, **options) as dataset:
        for batch in islice(dataset, steps):
            receipt.add(batch)
    return receipt.samples


def part(sequence: list[Sample], begin: int, end: int | None = None) -> dict[int, Sample]:
    return {index: sequence[index] for index in range(begin, len(sequence) if end is None else end)}


def ledger_rows(path: Path) -> dict[str, list[Mapping[str, Any]]]:
    """All that the ledger file holds, by table; without the lease, which a server renews as time passes."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        assert {"runs", "openings", "committed", "counters", "slots", "journal", "leases"} <= set(
            tables
        )
        tables.remove("leases")
        return {
            table: [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]
            for table in tables
        }


def standing(server: ServerProcess, run: str) -> dict[str, Any]:
    """Of the run's figures, what a trainer brings about."""
    found = server.get(f"/v1/runs/{run}/stats")
    kept = (
        "run_uid",
        "generation",
        "world_size",
        "batch_size",
        "sample_index",
        "digest",
        "total_tokens",
        "ended",
    )
    ranks = [(rank["rank"], rank["connected"], rank["position"]) for rank in found["ranks"]]
    sources = [(source["samples"], source["rows"], source["tokens"]) for source in found["sources"]]
    return {key: found[key] for key in kept} | {"ranks": ranks, "sources": sources}


def settled(server: ServerProcess, run: str, sample_index: int) -> dict[str, Any]:
    wait_for(
        lambda: standing(server, run)["sample_index"] == sample_index,
        f"the commit of sample {sample_index}",
    )
    return standing(server, run)


def test_peeks_beside_two_ranks_show_what_these_get_and_change_nothing(
    server: ServerProcess, sequence: list[Sample]
) -> None:
    run = "watched"
    url = server.url(run)
    with World(url, 2, 2, prefetch_steps=3) as world:
        world.steps(7)
        before, rows = settled(server, run, 28), ledger_rows(server.ledger_file)
        assert peeked(url, 3, at="fresh") == part(sequence, 0, len(sequence) // 3 * 3)
        assert peeked(url, 1, 5) == peeked(url, 1, 5, at="latest") == part(sequence, 28, 33)
        assert peeked(url, 4, 2, at=11) == part(sequence, 11, 19)
        with peek(url, at=5) as dataset:
            batch = next(iter(dataset))
            assert (dataset.rank, dataset.world_size, dataset.generation, dataset.start_index) == (
                0,
                1,
                0,
                5,
            )
            assert dataset.digest == rolling_digest(sequence[:6])
            assert (dataset.sample_index, batch["total_tokens"]) == (6, 6 * LENGTH)
            assert standing(server, run) == before
        assert (standing(server, run), ledger_rows(server.ledger_file)) == (before, rows)
        # And the ranks go on as if nobody had looked.
        world.run()
        assert world.receipt.sequence() == sequence[: world.sample_index]
        assert {rank.generation for rank in world.ranks} == {before["generation"]}
        settled(server, run, world.sample_index)
    assert ledger_rows(server.ledger_file)["openings"] == rows["openings"]


def test_training_resumes_at_the_state_of_a_peek(
    server: ServerProcess, sequence: list[Sample], rpc: Callable[[ServerProcess], Rpc]
) -> None:
    run = "from-a-peek"
    with World(server.url(run), 2, 2) as world:
        world.steps(5)
        settled(server, run, 20)
    with peek(server.url(run), 3, at=10) as dataset:
        at_once = dataset.state_dict()
        list(islice(dataset, 7))
        state = dataset.state_dict()
        assert json.loads(state["tokenloom"])["sample_index"] == 31
    assert json.loads(at_once["tokenloom"])["sample_index"] == 0, (
        "nothing is known before the first iter()"
    )
    # A peek resumes there, too.
    with peek(server.url(run)) as dataset:
        dataset.load_state_dict(state)
        receipt = Receipt()
        for batch in islice(dataset, 3):
            receipt.add(batch)
        assert receipt.samples == part(sequence, 31, 34)
    with World(server.url(run), 3, 1, state=state) as world:
        assert world.steps(4).receipt.sequence(31) == sequence[31:43]
        assert world.digest == rolling_digest(sequence[:43])
        settled(server, run, 43)
    # The journal has the lineage: what lies before is found in the generation that came from.
    assert json.loads(rpc(server).snapshot(run, 12))["sample_index"] == 12


# The command


def test_the_command_shows_sources_documents_and_text(
    corpus: Corpus, sequence: list[Sample], server: ServerProcess, tokenloom: CommandLine
) -> None:
    run = "shown"
    with World(server.url(run), 2, 2) as world:
        world.steps(5)
        settled(server, run, 20)
    rows = ledger_rows(server.ledger_file)
    done = tokenloom("peek", server.url(run), "--at", 4, "--samples", 40, "--json")
    assert done.status == 0, done.output
    found = [json.loads(line) for line in done.output.splitlines()]
    assert {
        line["sample"]: Sample(SPECS.index(line["spec"]), tuple(line["ids"])) for line in found
    } == part(sequence, 4, 44)
    assert [line["digest"] for line in found] == [
        rolling_digest(sequence[: index + 1]) for index in range(4, 44)
    ]
    decode = Tokenizer.from_file(str(corpus.folder / "tokenizer.json")).decode
    for line in found:
        assert line["text"] == decode(line["ids"], skip_special_tokens=False)
        ends = line["ids"].count(corpus.end_id)
        # What ends within the sample is followed by another document; an end at its end is not.
        assert line["documents"] == ends + (line["ids"][-1] != corpus.end_id)
        assert line["tokens"] == LENGTH

    table = tokenloom("peek", server.url(run), "--at", 4, "--samples", 2).output
    assert "20 samples are committed" in table
    for line in found[:2]:
        assert line["source"] in table
        assert line["text"][:12].translate({10: 0x240A}) in table
    assert " 4 " in table
    assert " 6 " not in table
    # Where lines are short, text comes before counts.
    table = tokenloom("peek", server.url(run), "--at", 4, "--samples", 2, columns=80).output
    assert max(map(len, table.splitlines())) <= 80 and "documents" not in table
    for line in found[:2]:
        assert line["text"][:12].translate({10: 0x240A}) in table

    texts = tokenloom("peek", server.url(run), "--at", 4, "--samples", 2, "--text").output
    assert all(line["text"] in texts for line in found[:2])
    assert "sample 5: " in texts
    # Where the ledger stands, if nothing is said.
    assert (
        json.loads(tokenloom("peek", server.url(run), "--samples", 1, "--json").output)["sample"]
        == 20
    )
    assert ledger_rows(server.ledger_file) == rows


def test_the_command_says_where_the_data_end_and_what_is_wrong(
    sequence: list[Sample], server: ServerProcess, tokenloom: CommandLine
) -> None:
    url, end = server.url("short"), len(sequence)
    done = tokenloom("peek", url, "--at", end - 2, "--samples", 5)
    assert done.status == 0
    assert f"{end - 1}" in done.output
    assert "the data end here: every source is exhausted" in done.output
    for arguments, says in (
        (
            (url, "--at", end + 1),
            f"BeyondHorizon: sample {end + 1} does not exist: the data end at sample {end}",
        ),
        ((url, "--at", 10**7), "BeyondHorizon: sample 10000000 is "),
        ((f"{url}-2",), "NotFound: there is no run 'short-2' on this server"),
        (("ftp://x:1",), "ConfigError: 'ftp://x:1' is not the address of a server"),
        (("grpc://127.0.0.1:1/short",), "ServerUnreachable: grpc://127.0.0.1:1/short: no answer"),
    ):
        done = tokenloom("peek", *arguments)
        assert done.status == 2
        assert says in done.output
    # An address that is dead is no reason to give up where another is given.
    alive = url.removeprefix("grpc://")
    assert tokenloom("peek", f"grpc://127.0.0.1:1,{alive}", "--samples", 1).status == 0

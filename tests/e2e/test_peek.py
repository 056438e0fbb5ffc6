"""Looking is free: peeks read the run's own order and leave no trace in run or ledger, whatever the run is doing."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import LENGTH, SPECS, Corpus, Rpc, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Receipt, Sample, World, rolling_digest, with_connection
from tokenizers import Tokenizer
from tokenloom import BeyondHorizon, JoinRefused, NotFound, PeekDataset, SnapshotInvalid, TooManyPeeks
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.seal import seal, unseal
from tokenloom_server.replay.past import AHEAD_SAMPLES, MAX_PEEKS


def peek(url: str, batch_size: int = 1, **options: Any) -> PeekDataset:
    return PeekDataset(url, batch_size, **with_connection(options))


def peeked(url: str, batch_size: int = 1, steps: int | None = None, **options: Any) -> dict[int, Sample]:
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
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert {"runs", "openings", "committed", "counters", "slots", "journal", "leases"} <= set(tables)
        tables.remove("leases")
        return {table: [dict(row) for row in connection.execute(f"SELECT * FROM {table}")] for table in tables}


def standing(server: ServerProcess, run: str) -> dict[str, Any]:
    """Of the run's figures, what a trainer brings about."""
    found = httpx.get(f"{server.rest_url}/v1/runs/{run}/stats", trust_env=False, timeout=20).json()
    kept = ("run_uid", "generation", "world_size", "batch_size", "sample_index", "digest", "total_tokens", "ended")
    ranks = [(rank["rank"], rank["connected"], rank["position"]) for rank in found["ranks"]]
    sources = [(source["samples"], source["rows"], source["tokens"]) for source in found["sources"]]
    return {key: found[key] for key in kept} | {"ranks": ranks, "sources": sources}


def settled(server: ServerProcess, run: str, sample_index: int) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while (found := standing(server, run))["sample_index"] != sample_index:
        assert time.monotonic() < deadline, f"sample {sample_index} is not committed: {found}"
        time.sleep(0.02)
    return found


def test_peeks_beside_two_ranks_show_what_these_get_and_change_nothing(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    run = "watched"
    server = start_server(corpus.mixture(run, window_micro_steps=6))
    url = server.url(run)
    with World(url, 2, 2, prefetch_steps=3) as world:
        world.steps(7)
        before, rows = settled(server, run, 28), ledger_rows(server.ledger_file)
        assert peeked(url, 3, at="fresh") == part(sequence, 0, len(sequence) // 3 * 3)
        assert peeked(url, 1, 5) == peeked(url, 1, 5, at="latest") == part(sequence, 28, 33)
        assert peeked(url, 4, 2, at=11) == part(sequence, 11, 19)
        with peek(url, at=5) as dataset:
            batch = next(iter(dataset))
            assert (dataset.rank, dataset.world_size, dataset.generation, dataset.start_index) == (0, 1, 0, 5)
            assert dataset.digest == rolling_digest(sequence[:6])
            assert (dataset.sample_index, batch["total_tokens"]) == (6, 6 * LENGTH)
            assert standing(server, run) == before
        assert (standing(server, run), ledger_rows(server.ledger_file)) == (before, rows)
        # And the ranks go on as if nobody had looked.
        world.run()
        assert world.receipt.sequence() == sequence[: world.sample_index]
        assert {rank.generation for rank in world.ranks} == {before["generation"]}
        settled(server, run, world.sample_index)
    assert len(ledger_rows(server.ledger_file)["openings"]) == 1


def test_a_run_that_nobody_joined_can_be_looked_at_and_begins_as_before(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, ledger: str
) -> None:
    run = "untouched"
    server = start_server(corpus.mixture(run), ledger=ledger)
    assert peeked(server.url(run), 2, 9) == part(sequence, 0, 18)
    assert peeked(server.url(run), 1, 2, at=30) == part(sequence, 30, 32)
    # What a peek has at the end is never committed, and its place is free all the same.
    finished = [peek(server.url(run), at=len(sequence) - 1) for _ in range(MAX_PEEKS + 1)]
    assert [len(list(dataset)) for dataset in finished] == [1] * len(finished)
    for dataset in finished:
        dataset.close()
    assert standing(server, run)["generation"] == 0
    # A launch that brings no state is refused where there is progress: there is none.
    with World(server.url(run), 2, 3) as world:
        assert world.steps(4).receipt.sequence() == sequence[:24]
        assert world.ranks[0].generation == 1


def test_a_padded_last_step_is_padded_for_who_looks_too(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    run = "padded-peek"
    server = start_server(corpus.mixture(run, last_micro_step="pad"))
    begin = len(sequence) - 5
    with peek(server.url(run), 4, at=begin) as dataset:
        batches = list(dataset)
        assert [batch["sample_ids"].tolist() for batch in batches] == [
            list(range(begin, begin + 4)),
            [begin + 4, -1, -1, -1],
        ]
        assert dataset.sample_index == len(sequence)


def test_a_peek_goes_over_to_the_standby(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine
) -> None:
    run, flags = "led-peek", ("--lease", 2, "--standby")
    written = corpus.mixture(run)
    leader = start_server(written, ledger="sqlite:///../shared-peek.db", flags=flags[:2])
    standby = start_server(written, ledger="sqlite:///../shared-peek.db", flags=flags)
    both = f"grpc://{standby.grpc},{leader.grpc}/{run}"
    receipt = Receipt()
    with peek(both, 2, at=3, prefetch_steps=2) as dataset:
        batches = iter(dataset)
        for _ in range(4):
            receipt.add(next(batches))
        assert tokenloom("peek", both, "--samples", 1).status == 0
        refused = tokenloom("peek", standby.url(run)).output
        assert refused.startswith(f"NotLeader: this server does not lead run '{run}'"), refused
        leader.kill()
        for _ in range(8):
            receipt.add(next(batches))
    assert receipt.samples == part(sequence, 3, 27)


def test_training_resumes_at_the_state_of_a_peek(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    run = "from-a-peek"
    server = start_server(corpus.mixture(run))
    with World(server.url(run), 2, 2) as world:
        world.steps(5)
        settled(server, run, 20)
    with peek(server.url(run), 3, at=10) as dataset:
        at_once = dataset.state_dict()
        list(islice(dataset, 7))
        state = dataset.state_dict()
        assert json.loads(state["tokenloom"])["sample_index"] == 31
    assert json.loads(at_once["tokenloom"])["sample_index"] == 0, "nothing is known before the first iter()"
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


def test_what_cannot_be_looked_at_is_refused_by_name(
    corpus: Corpus, start_server: StartServer, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    run = "refusing"
    server = start_server(corpus.mixture(run), corpus.mixture("other"))
    url = server.url(run)
    far = AHEAD_SAMPLES + 1
    with pytest.raises(BeyondHorizon, match=rf"{far} samples beyond sample 0, .* goes {AHEAD_SAMPLES} further at most"):
        peeked(url, at=far)
    with pytest.raises(NotFound, match=r"resume='99999999999999999': run 'refusing' has no snapshot of that id"):
        peeked(url, at="9" * 17)
    with pytest.raises(NotFound, match="there is no run 'nobody' on this server"):
        peeked(server.url("nobody"))
    with pytest.raises(JoinRefused, match="micro-step of 1000000 samples has 32000000 bytes; expected 1 sample to"):
        peeked(url, 10**6)
    with peek(server.url("other")) as dataset:
        next(iter(dataset))
        foreign = dataset.state_dict()
    with peek(url) as dataset, pytest.raises(SnapshotInvalid, match="run"):
        dataset.load_state_dict(foreign)
        iter(dataset)
    with peek(url, at=3) as dataset:
        next(iter(dataset))
        document = unseal(dataset.state_dict()["tokenloom"])
    forged = seal({key: value for key, value in document.items() if key != "checksum"} | {"digest": "1" * 32})
    with peek(url) as dataset, pytest.raises(SnapshotInvalid, match=r"going forward .* gives digest"):
        dataset.load_state_dict({"tokenloom": forged})
        iter(dataset)
    calls = rpc(server).stub
    with pytest.raises(Exception, match="rank 1 of 2; expected rank 0 of 1"):
        calls.Join(wire.JoinRequest(run=run, peek=True, rank=1, world_size=2, batch_size=1), timeout=20)


def test_only_so_many_look_at_once_and_the_next_may_when_one_is_done(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    run = "popular"
    server = start_server(corpus.mixture(run))
    url = server.url(run)
    opened = [peek(url) for _ in range(MAX_PEEKS)]
    try:
        for dataset in opened:
            next(iter(dataset))
        with pytest.raises(TooManyPeeks, match=f"{MAX_PEEKS} peeks at run 'popular' are open already"):
            peeked(url, connect_timeout_s=0.3)
        # Training is not concerned.
        with World(url, 2, 2) as world:
            assert world.steps(3).receipt.sequence() == sequence[:12]
        timer = threading.Timer(0.3, opened[0].close)
        timer.start()
        assert peeked(url, 1, 3, at=2) == part(sequence, 2, 5)
        timer.join()
    finally:
        for dataset in opened:
            dataset.close()


# The command


def test_the_command_shows_sources_documents_and_text(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine
) -> None:
    run = "shown"
    server = start_server(corpus.mixture(run))
    with World(server.url(run), 2, 2) as world:
        world.steps(5)
        settled(server, run, 20)
    rows = ledger_rows(server.ledger_file)
    done = tokenloom("peek", server.url(run), "--at", 4, "--samples", 40, "--json")
    assert done.status == 0, done.output
    found = [json.loads(line) for line in done.output.splitlines()]
    assert {line["sample"]: Sample(SPECS.index(line["spec"]), tuple(line["ids"])) for line in found} == part(
        sequence, 4, 44
    )
    assert [line["digest"] for line in found] == [rolling_digest(sequence[: index + 1]) for index in range(4, 44)]
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

    texts = tokenloom("peek", server.url(run), "--at", 4, "--samples", 2, "--text").output
    assert all(line["text"] in texts for line in found[:2])
    assert "sample 5: " in texts
    # Where the ledger stands, if nothing is said.
    assert json.loads(tokenloom("peek", server.url(run), "--samples", 1, "--json").output)["sample"] == 20
    assert ledger_rows(server.ledger_file) == rows


def test_the_command_says_where_the_data_end_and_what_is_wrong(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine
) -> None:
    run = "short"
    server = start_server(corpus.mixture(run))
    url, end = server.url(run), len(sequence)
    done = tokenloom("peek", url, "--at", end - 2, "--samples", 5)
    assert done.status == 0
    assert f"{end - 1}" in done.output
    assert "the data end here: every source is exhausted" in done.output
    for arguments, says in (
        ((url, "--at", end + 1), f"BeyondHorizon: sample {end + 1} does not exist: the data end at sample {end}"),
        ((url, "--at", 10**7), "BeyondHorizon: sample 10000000 is "),
        ((f"{url}-2",), "NotFound: there is no run 'short-2' on this server"),
        ((server.rest_url,), "ConfigError: "),
        (("grpc://127.0.0.1:1/short",), "ServerUnreachable: grpc://127.0.0.1:1/short: no answer"),
    ):
        done = tokenloom("peek", *arguments)
        assert done.status == 2
        assert says in done.output
    # An address that is dead is no reason to give up where another is given.
    alive = url.removeprefix("grpc://")
    assert tokenloom("peek", f"grpc://127.0.0.1:1,{alive}", "--samples", 1).status == 0

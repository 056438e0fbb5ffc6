"""A job that trained with an older data loader goes on here, and from then on exactly."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LENGTH, SPECS, Corpus, Rpc, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Receipt, Sample, World
from tokenloom import BeyondHorizon, JoinRefused, PeekDataset, RemoteDataset, SnapshotInvalid

OLD = {"spec": "parquet:gone-*.parquet:text", "shard": "gone-3.parquet", "row_offset": 12, "token_offset": 5000}


def older(corpus: Corpus, *, tokens: bool = True) -> dict[str, Any]:
    """What an older loader would have saved: a few rows into each source but the last, which it did not have."""
    rows = {SPECS[0]: ("code-1.parquet", 4, 34), SPECS[1]: ("prose.txt", 3, 3), SPECS[2]: ("docs.jsonl", 8, 8)}
    datasets = [OLD]
    for source, (spec, (shard, row, passed)) in enumerate(rows.items()):
        entry = {"spec": spec, "shard": str(corpus.folder / shard), "row_offset": row}
        datasets.append(entry | ({"token_offset": corpus.ends[source][passed - 1]} if tokens else {}))
    return {"resume_state": {"datasets": datasets}, "model": "beside it"}


def expected(corpus: Corpus) -> dict[int, list[tuple[int, ...]]]:
    """Each source's samples from there to its end."""
    found = {}
    for source, passed in enumerate((34, 3, 8, 0)):
        begin = corpus.ends[source][passed - 1] if passed else 0
        stream = corpus.streams[source][begin:]
        found[source] = [stream[at : at + LENGTH] for at in range(0, len(stream) - LENGTH + 1, LENGTH)]
    return found


def by_source(samples: list[Sample]) -> dict[int, list[tuple[int, ...]]]:
    return {source: [sample.ids for sample in samples if sample.source == source] for source in range(len(SPECS))}


def datasets_of(state: dict[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(state["tokenloom"])["resume_state"]["datasets"]
    return found


def start_of(corpus: Corpus) -> int:
    """Samples that the counters begin with."""
    return sum(corpus.ends[source][passed - 1] // LENGTH for source, passed in enumerate((34, 3, 8)))


def test_a_job_goes_on_from_an_older_checkpoint_and_then_exactly(
    corpus: Corpus, start_server: StartServer, rpc: Callable[[ServerProcess], Rpc], ledger: str
) -> None:
    run = f"older-{ledger.partition(':')[0]}"
    server = start_server(corpus.mixture(run), ledger=ledger, flags=("--liveness", 1))
    payload, begin = older(corpus), start_of(corpus)
    with World(server.url(run), state=payload) as world:
        whole = world.run().receipt.sequence(begin)
        end, digest = world.sample_index, world.digest
    assert by_source(whole) == expected(corpus)
    assert world.ranks[0].total_tokens == end * LENGTH

    # The same from the older checkpoint once more, on other ranks; saved, killed, and gone on from what was saved.
    received = Receipt()
    with World(server.url(run), 2, 3, state=payload) as world:
        world.join()
        assert world.sample_index == begin
        state = world.steps(3).state()
        received.samples.update(world.receipt.samples)
        assert datasets_of(state)[-1] == {**OLD, "unknown": True}
        server.kill()
    server.start()
    with World(server.url(run), 1, 2, state=state) as world:
        second = world.steps(4).state()
        received.samples.update(world.receipt.samples)
    # A node without the ledger: the order still begins where the older checkpoint stood.
    other = start_server(corpus.mixture(run))
    with World(other.url(run), 1, 1, state=second) as world:
        last = world.run().state()
        received.samples.update(world.receipt.samples)
        assert (world.sample_index, world.digest) == (end, digest)
    assert received.sequence(begin) == whole
    assert datasets_of(last)[-1] == {**OLD, "unknown": True}
    assert rpc(other).snapshot(run) == last["tokenloom"]
    with pytest.raises(BeyondHorizon, match="began at sample"):
        next(iter_peek(other, run, str(begin - 1)))


def iter_peek(server: ServerProcess, run: str, resume: str | None = None, state: Any = None) -> Any:
    return iter(PeekDataset(server.url(run), 1, at=resume if state is None else state))


def test_each_spec_is_logged_once_and_the_counters_begin_with_the_old_ones(
    corpus: Corpus, start_server: StartServer
) -> None:
    run = "older-log"
    server = start_server(corpus.mixture(run, new_source_baseline="mean"))
    with World(server.url(run), 2, state=older(corpus)) as world:
        world.join()
        with urllib.request.urlopen(f"{server.rest_url}/v1/runs/{run}/stats") as answer:
            stats = json.load(answer)
    assert [source["samples"] for source in stats["sources"]] == [
        corpus.ends[source][passed - 1] // LENGTH if passed else 0 for source, passed in enumerate((34, 3, 8, 0))
    ]
    assert [source["rows"] for source in stats["sources"]] == [34, 3, 8, 0]
    lines = [line.partition("INFO    ")[2] for line in server.log.splitlines() if "resume: " in line]
    tokens = [corpus.ends[source][passed - 1] // LENGTH * LENGTH for source, passed in enumerate((34, 3, 8))]
    assert lines == [
        f"resume: spec={SPECS[0]} shard=code-1.parquet row_offset=4 tokens={tokens[0]} (from an older checkpoint)",
        f"resume: spec={SPECS[1]} shard=prose.txt row_offset=3 tokens={tokens[1]} (from an older checkpoint)",
        f"resume: spec={SPECS[2]} shard=docs.jsonl row_offset=8 tokens={tokens[2]} (from an older checkpoint)",
        f"resume: spec={SPECS[3]} new: starts at its beginning; the policies above it keep no balance",
        f"resume: spec={OLD['spec']} preserved: not in this mixture",
    ]


def test_without_token_offsets_the_cursors_hold_and_the_counters_begin_at_zero(
    corpus: Corpus, start_server: StartServer
) -> None:
    run = "older-tokens"
    server = start_server(corpus.mixture(run), flags=("--liveness", 1))
    for _ in range(2):
        with World(server.url(run), state=older(corpus, tokens=False)) as world:
            world.join()
            assert world.sample_index == 0
            first = world.run().receipt.sequence()
        assert by_source(first) == expected(corpus)


def test_a_sample_index_alone_skips_so_many_samples(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    run = "older-index"
    server = start_server(corpus.mixture(run), flags=("--liveness", 1))
    with World(server.url(run), 2, 2, state={"sample_index": 41}) as world:
        state = world.steps(3).state()
        assert world.receipt.sequence(41) == sequence[41:53]
        server.kill()
    server.start()
    with World(server.url(run), 1, 1, state=state) as world:
        assert world.run().receipt.sequence(53) == sequence[53:]
    with World(server.url(run), 3, 1, state={"sample_index": 53}, takeover=True) as world:
        world.steps(2)
        assert world.receipt.sequence(53) == sequence[53:59]
    # Samples of the run's own order may be looked at before it, too.
    assert tuple(next(iter_peek(server, run, "7"))["input_ids"][0].tolist()) == sequence[7].ids


def test_a_rank_of_a_launch_that_opened_before_a_restart_agrees_with_the_same_checkpoint_only(
    corpus: Corpus, start_server: StartServer
) -> None:
    run = "older-ranks"
    server = start_server(corpus.mixture(run))
    for attempt, payload in (("one", {"sample_index": 41}), ("two", older(corpus))):
        options: dict[str, Any] = {"world_size": 2, "attempt": attempt, "takeover": True}
        first = RemoteDataset(server.url(run), 1, rank=0, **options)
        first.load_state_dict(payload)
        iter(first)
        server.kill()
        server.start()
        second = RemoteDataset(server.url(run), 1, rank=1, **options)
        second.load_state_dict({"sample_index": 40})
        with pytest.raises(JoinRefused, match="load the same checkpoint on every rank"):
            iter(second)
        again = RemoteDataset(server.url(run), 1, rank=1, **options)
        again.load_state_dict(payload)
        iter(again)
        assert again.sample_index == first.sample_index
        again.close()
        first.close()


def test_what_the_dataset_says_before_it_joined(corpus: Corpus, start_server: StartServer) -> None:
    run = "older-client"
    server = start_server(corpus.mixture(run))
    dataset = RemoteDataset(server.url(run), 1)
    dataset.load_state_dict(older(corpus))
    with pytest.raises(RuntimeError, match="known once the run is joined"):
        _ = dataset.sample_index
    # Saved before the first batch: still the older checkpoint, in the place of a state.
    again = RemoteDataset(server.url(run), 1)
    again.load_state_dict(dataset.state_dict())
    iter(again)
    assert again.sample_index == start_of(corpus)
    state = again.state_dict()
    again.close()
    assert json.loads(state["tokenloom"])["sample_index"] == start_of(corpus)
    with World(server.url(run), state=state, takeover=True) as world:
        world.steps(2)


@pytest.mark.parametrize("baseline", ["min", "mean", "zero"])
def test_a_new_source_begins_at_the_baseline(corpus: Corpus, start_server: StartServer, baseline: str) -> None:
    run = f"older-{baseline}"
    flat = {"policy": "least_consumed", "children": [{"source": spec, "epochs": 9} for spec in SPECS]}
    mixture = corpus.mixture(run, mixture=flat, new_source_baseline=baseline)
    server = start_server(mixture, flags=("--liveness", 1))
    had = [corpus.ends[source][passed - 1] // LENGTH for source, passed in enumerate((34, 3, 8))]
    begun = {"min": min(had), "mean": sum(had) / 3, "zero": 0}[baseline]
    with World(server.url(run), state=older(corpus)) as world:
        world.join()
        assert f"spec={SPECS[3]} new: starts at " in server.log
        assert f", {int(begun * LENGTH)} tokens" in server.log
        state = world.state()
        assert datasets_of(state)[3]["samples"] == 0
        # Who has the fewest is next, one after the other, until all but the one with the most are level.
        count = int(sum(max(had) - each for each in (*had, begun)) / 2)
        world.steps(count)
        picked = [sample.source for sample in world.receipt.sequence(start_of(corpus))]
        behind = [each + picked.count(source) for source, each in enumerate((*had, begun))]
        raised = [now for now, was in zip(behind, (*had, begun), strict=True) if now > was]
        assert max(raised) - min(raised) <= 1
        assert all(each >= max(raised) - 1 for each in behind)
        half = world.state()
        rest = world.steps(30).receipt.sequence(start_of(corpus))[count:]
    with World(server.url(run), 1, 1, state=half) as world:
        assert world.steps(30).receipt.sequence(start_of(corpus) + count) == rest


def test_a_restore_takes_an_older_payload_and_the_next_job_begins_there(
    corpus: Corpus, start_server: StartServer
) -> None:
    run = "older-restore"
    server = start_server(corpus.mixture(run))
    text = json.dumps(older(corpus))
    body = json.dumps({"snapshot": text}).encode()
    request = urllib.request.Request(
        f"{server.rest_url}/v1/runs/{run}/restore", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        pinned = json.load(answer)
    assert pinned["sample_index"] == start_of(corpus)
    with World(server.url(run)) as world:
        world.join()
        assert (world.sample_index, world.digest) == (pinned["sample_index"], pinned["digest"])
        assert by_source(world.run().receipt.sequence(pinned["sample_index"])) == expected(corpus)


@pytest.mark.parametrize("form", ["datasets", "sample_index"])
def test_samples_behind_an_older_checkpoint_can_be_skipped(
    corpus: Corpus, start_server: StartServer, tokenloom: CommandLine, tmp_path: Path, form: str
) -> None:
    run = f"older-skip-{form.partition('_')[0]}"
    server = start_server(corpus.mixture(run), flags=("--liveness", 1))
    payload: dict[str, Any] = older(corpus) if form == "datasets" else {"sample_index": 41}
    begin = start_of(corpus) if form == "datasets" else 41
    with World(server.url(run), state=payload) as world:
        whole = world.run().receipt.sequence(begin)
        digest = world.digest
    (tmp_path / "older.json").write_text(json.dumps(payload))
    done = tokenloom("restore", server.rest_url, "--state", tmp_path / "older.json", "--skip-samples", 7)
    assert done.status == 0, done.output
    assert f"samples {begin} to {begin + 6} are skipped" in done.output
    attempt = {"world_size": 2, "attempt": "skips"}
    first = RemoteDataset(server.url(run), 1, rank=0, **attempt)
    first.load_state_dict(payload)
    iter(first)
    assert first.sample_index == begin + 7
    server.kill()
    server.start()
    # Opened before the restart: another rank with the same checkpoint still agrees.
    second = RemoteDataset(server.url(run), 1, rank=1, **attempt)
    second.load_state_dict(payload)
    iter(second)
    state = second.state_dict()
    first.close()
    second.close()
    with World(server.url(run), state=state, takeover=True) as world:
        assert world.run().receipt.sequence(begin + 7) == whole[7:]
        assert world.digest == digest
    traced = tokenloom("trace", server.rest_url, "--sample", begin + 9, "--json")
    assert traced.status == 0, traced.output
    assert json.loads(traced.output)["sample"] == begin + 9
    if form == "datasets":
        before = tokenloom("trace", server.rest_url, "--sample", begin - 1)
        assert before.status != 0
        assert "from an older data loader's checkpoint" in before.output


def test_a_peek_does_not_begin_an_order_of_its_own(corpus: Corpus, start_server: StartServer) -> None:
    run = "older-peek"
    server = start_server(corpus.mixture(run))
    with pytest.raises(JoinRefused, match="begins an order of its own"):
        iter_peek(server, run, state=older(corpus))
    begin = start_of(corpus)
    # What is remembered of the order as it was must not be taken for the one that begins now.
    next(iter_peek(server, run, str(begin + 9)))
    with World(server.url(run), state=older(corpus)) as world:
        whole = world.run().receipt.sequence(begin)
    assert tuple(next(iter_peek(server, run, str(begin + 12)))["input_ids"][0].tolist()) == whole[12].ids
    assert tuple(next(iter_peek(server, run, state=older(corpus)))["input_ids"][0].tolist()) == whole[0].ids


def test_what_does_not_fit_is_refused_by_name(corpus: Corpus, start_server: StartServer) -> None:
    run = "older-refused"
    server = start_server(corpus.mixture(run))
    for change, said in (
        ({"row_offset": 99}, r"row_offset is 99, but prose\.txt has 7 rows"),
        ({"row_offset": -1}, r"datasets\.2 \(spec 'txt:prose\.txt:text'\): row_offset: found -1"),
        ({"shard": "poetry.txt"}, r"shard 'poetry\.txt' is none of the source's files; expected one of 'prose\.txt'"),
    ):
        payload = older(corpus)
        payload["resume_state"]["datasets"][2].update(change)
        with World(server.url(run), state=payload) as world, pytest.raises(SnapshotInvalid, match=said):
            world.join()
    for bad in ({"resume_state": {"datasets": {1, 2}}}, {"model": 1}):
        with pytest.raises(SnapshotInvalid, match=r"expected plain JSON|got the keys \['model'\]"):
            RemoteDataset(server.url(run), 1).load_state_dict(bad)

"""A mixture that changes while ranks train on it: real servers, held against the order that a course gives here."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conftest import StartServer
from support.catalog import CATALOG
from support.corpora import write_parquet
from support.server_process import CommandLine, ServerProcess
from support.timelines import revised
from support.trainer import Sample, World, rolling_digest
from support.waiting import wait_for
from tokenloom import ConnectionOptions, PeekDataset, RemoteDataset
from tokenloom_server.config import mixture_file as config
from tokenloom_server.core.state import digest_hex
from tokenloom_server.order import builder
from tokenloom_server.order.timeline import Timeline

LENGTH = 16
RANKS, BATCH = 2, 1
#: Samples between two state boundaries of such a generation.
GROUP = 64 * RANKS * BATCH
WINDOW = 16
#: Every token of a row is the row's own number, so that samples tell which rows they are of.
NUMBERS = {"a": 1_000, "b": 10_000, "c": 20_000, "late": 30_000, "more": 40_000}
NODE = {
    "policy": "least_consumed",
    "children": [
        {"source": "parquet:a-*.parquet:ids", "alias": "a", "weight": 2},
        {"source": "parquet:b.parquet:ids", "alias": "b"},
        {"source": "parquet:c.parquet:ids", "alias": "c"},
    ],
}
LATE = {"source": "parquet:late.parquet:ids", "alias": "late"}


def rows(name: str, count: int = 400) -> list[list[int]]:
    lengths = random.Random(name)
    return [[NUMBERS[name] + row] * lengths.randrange(5, 60) for row in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("revised")
    for name in ("a", "b", "c", "late"):
        write_parquet(folder / f"{'a-0' if name == 'a' else name}.parquet", rows(name), group=50)
    return folder


def write_mixture(folder: Path, run: str, **fields: Any) -> Path:
    document = {
        "run": run,
        "seed": 3,
        "vocab_size": 60_000,
        "end_of_text_id": 0,
        "sequence_length": LENGTH,
        "window_micro_steps": WINDOW,
        "mixture": NODE,
    }
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
    return path


def course_of(mixture: Path) -> Timeline:
    """The order of the run, worked out here and not by any server."""
    return Timeline(builder.create(config.load(mixture, CATALOG), mixture.parent, None))


def check(world: World, timeline: Timeline, begin: int = 0) -> list[Sample]:
    """That the ranks got the course's order from ``begin`` on, nothing else, nothing twice; returns the samples."""
    samples = world.receipt.sequence(begin)
    pipeline = timeline.pipeline(timeline.initial())
    pipeline.advance(begin)
    start = digest_hex(pipeline.state().digest)
    pipeline.advance(len(samples))
    assert pipeline.sample_index == begin + len(samples)
    assert rolling_digest(samples, digest=start) == digest_hex(pipeline.state().digest) == world.digest
    return samples


class Mixture:
    """The mixture's routes of one run."""

    def __init__(self, server: ServerProcess, run: str) -> None:
        self._server = server
        self._path = f"/v1/runs/{run}"

    def revise(self, **change: Any) -> dict[str, Any]:
        answer = self.patch(**change)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def patch(self, **change: Any) -> httpx.Response:
        return self._server.request("PATCH", f"{self._path}/mixture", json={"reason": "why", **change})

    def read(self) -> Any:
        return self._server.get(f"{self._path}/mixture")


def until(world: World, sample_index: int) -> World:
    while world.sample_index < sample_index:
        assert world.step() is not None, "the data ended"
    return world


def test_a_change_holds_for_all_ranks_from_the_index_that_was_told(
    folder: Path, start_server: StartServer, ledger: str
) -> None:
    run = "changed"
    path = write_mixture(folder, run)
    server = start_server(path, ledger=ledger)
    mixture = Mixture(server, run)
    change = {"set": [{"child": "a", "weight": 0.5}, {"child": "c", "weight": 6}]}
    with World(server.url(run), RANKS, BATCH) as world:
        until(world, 40)
        tried = mixture.revise(**change, dry_run=True)
        made = mixture.revise(**change, author="ada")
        assert (made["number"], made["sample_index"], made["in_force"]) == (1, GROUP, False)
        assert made["changes"] == tried["changes"] == ["a: weight 2 → 0.5", "c: weight 1 → 6"]
        assert made["total_tokens"] == GROUP * LENGTH
        assert len(mixture.read()["revisions"]) == 1, "what was only tried was made"
        for depth, status in ((50, 200), (300, 422), (5000, 422)):
            text = '{"reason":"why","dry_run":true,"mixture":' + '{"policy":"weighted","children":[' * depth
            text += json.dumps(LATE) + "]}" * depth + "}"
            headers = {"content-type": "application/json"}
            route = f"/v1/runs/{run}/mixture"
            assert server.request("PATCH", route, content=text, headers=headers).status_code == status, depth
        until(world, 3 * GROUP)
    samples = check(world, revised(course_of(path), made["sample_index"], **change))
    before, behind = samples[:GROUP], samples[GROUP:]
    for part, weights in ((before, (2, 1, 1)), (behind, (0.5, 1, 6))):
        for source, weight in enumerate(weights):
            got = sum(sample.source == source for sample in part)
            assert abs(got - len(part) * weight / sum(weights)) <= 1.5
    found = mixture.read()
    assert [(each["author"], each["in_force"]) for each in found["revisions"]] == [("ada", True)]
    assert found["mixture"]["children"][2]["weight"] == 6
    assert f"{run}: revision 1 holds from sample {GROUP} on (why): a: weight 2 → 0.5" in server.log


def test_a_revision_outlasts_a_killed_server_before_and_behind_its_index(
    folder: Path, start_server: StartServer, ledger: str
) -> None:
    run = "killed"
    path = write_mixture(folder, run)
    server = start_server(path, ledger=ledger)
    change = {"set": [{"child": "b", "weight": 5}], "add": [{"child": LATE}]}
    with World(server.url(run), RANKS, BATCH) as world:
        until(world, 20)
        made = Mixture(server, run).revise(**change)
        server.kill()
        server.start()
        assert [each["sample_index"] for each in Mixture(server, run).read()["revisions"]] == [GROUP]
        until(world, made["sample_index"] + 30)
        server.kill()
        server.start()
        until(world, made["sample_index"] + 2 * GROUP)
        assert {rank.generation for rank in world.ranks} == {1}
        samples = check(world, revised(course_of(path), made["sample_index"], **change))
        assert {sample.source for sample in samples} == {0, 1, 2, 3}


def _peek(server: ServerProcess, run: str) -> RemoteDataset:
    """One that does not look so far ahead that a revision would change what it saw."""
    return PeekDataset(server.url(run), 1, connection=ConnectionOptions(prefetch_steps=8))


def test_a_new_source_comes_while_ranks_train_and_everybody_knows_its_name(
    folder: Path, start_server: StartServer, tokenloom: CommandLine
) -> None:
    run = "widened"
    path = write_mixture(folder, run)
    server = start_server(path)
    # Not at a state boundary: it comes within a group.
    add = {"add": [{"child": LATE | {"weight": 3}}], "sample_index": GROUP + 21}
    with World(server.url(run), RANKS, BATCH) as world, _peek(server, run) as peek:
        until(world, 10)
        looked = [int(batch["source_ids"][0]) for _, batch in zip(range(20), peek, strict=False)]
        assert set(looked) <= {0, 1, 2}
        Mixture(server, run).revise(**add)
        assert [source.alias for source in world.ranks[1].sources] == ["a", "b", "c"]
        until(world, GROUP + 40)
        assert any(sample.source == 3 for sample in world.receipt.samples.values())
        for rank in world.ranks:
            assert [(s.id, s.spec, s.alias) for s in rank.sources][3] == (3, LATE["source"], "late")
        until(world, 3 * GROUP)
        check(world, revised(course_of(path), GROUP + 21, add=add["add"]))
        state = world.state()
        # Somebody who looked since before the revision goes on into it.
        looked += [int(batch["source_ids"][0]) for _, batch in zip(range(2 * GROUP), peek, strict=False)]
        assert 3 in looked
        assert peek.sources[3].alias == "late"
    assert [entry["spec"] for entry in json.loads(state["tokenloom"])["resume_state"]["datasets"]][3] == LATE["source"]
    shown = tokenloom("peek", server.url(run), "--at", GROUP, "--samples", 60)
    assert shown.status == 0, shown.output
    assert " late " in shown.output
    with World(server.url(run), 1, 1, state=state) as world:
        assert world.join().ranks[0].sources[3].alias == "late"


def test_files_that_appear_are_read_once_they_are_appended(tmp_path: Path, start_server: StartServer) -> None:
    run = "grown"
    for name in ("a", "b", "c"):
        write_parquet(tmp_path / f"{'a-0' if name == 'a' else name}.parquet", rows(name, 150), group=50)
    path = write_mixture(tmp_path, run)
    plain = course_of(path)
    server = start_server(path)
    mixture = Mixture(server, run)
    with World(server.url(run), RANKS, BATCH) as world:
        until(world, 10)
        refused = mixture.patch(append_files=["a"])
        assert refused.status_code == 422
        assert "has no file that the run does not read already" in refused.json()["message"]
        write_parquet(tmp_path / "a-1.parquet", rows("more"), group=50)
        made = mixture.revise(append_files=["a"])
        assert made["changes"] == ["parquet:a-*.parquet:ids: 1 files more"]
        world.run()
    samples = check(world, revised(plain, made["sample_index"], append_files=["a"]))
    got = {token for sample in samples for token in sample.ids}
    assert got >= {NUMBERS["more"] + row for row in range(399)}
    # The server reads them behind a restart, too.
    server.kill()
    server.start()
    with World(server.url(run), 1, 4, resume="fresh") as world:
        assert world.run().receipt.sequence()[: len(samples)] == samples


def test_excluded_rows_are_absent_from_then_on_and_counted(folder: Path, start_server: StartServer) -> None:
    run = "taken-down"
    path = write_mixture(folder, run)
    server = start_server(path)
    mixture = Mixture(server, run)
    gone = {"a": range(0, 400, 3), "parquet:b.parquet:ids": range(0, 400, 2)}
    with (folder / "gone.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("spec", "shard", "row"))
        for spec, numbers in gone.items():
            shard = "a-0.parquet" if spec == "a" else "b.parquet"
            writer.writerows((spec, shard, row) for row in numbers)
    with World(server.url(run), RANKS, BATCH) as world:
        until(world, 10)
        made = mixture.revise(exclude={"file": "gone.csv"})
        assert made["changes"] == ["a: 134 rows left out of each epoch", "b: 200 rows left out of each epoch"]
        until(world, 6 * GROUP)
    samples = check(world, revised(course_of(path), made["sample_index"], exclude={"file": "gone.csv"}))
    for source, (name, step) in enumerate((("a", 3), ("b", 2))):
        ids = [token - NUMBERS[name] for s in samples[GROUP:] if s.source == source for token in s.ids if token]
        begun = ids[0]  # a row that was begun before is read to its end
        assert len(set(ids)) > 40
        assert not any(row % step == 0 for row in ids if row != begun)
    assert {s["alias"]: s["excluded_rows"] for s in server.get(f"/v1/runs/{run}/stats")["sources"]} == {
        "a": 134,
        "b": 200,
        "c": 0,
    }
    # The file has to stay as it is.
    (folder / "gone.csv").write_text("spec,shard,row\na,a-0.parquet,1\n", encoding="utf-8")
    server.kill()
    with pytest.raises(RuntimeError, match=r"SourceChanged: 'gone.csv' lists the rows that a revision left out"):
        server.start()


def test_a_phase_with_longer_samples_is_joined_again_from_the_state(folder: Path, start_server: StartServer) -> None:
    run = "longer"
    begin = 101
    phases = [{"until_tokens": begin * LENGTH}, {"sequence_length": 4 * LENGTH}]
    path = write_mixture(folder, run, phases=phases, last_micro_step="pad")
    server = start_server(path)
    with World(server.url(run), RANKS, BATCH) as world:
        state = world.run().state()
        assert (world.sample_index, world.ranks[0].total_tokens) == (begin, begin * LENGTH)
        reason = world.ranks[0].end_reason
        assert reason is not None
        assert f"sample {begin} begins phase 1, with a sequence length of {4 * LENGTH} instead of {LENGTH}" in reason
        check(world, course_of(path))
    # Between the phases a revision is not after the end of the data, and holds from where the run stands.
    change = {"set": [{"child": "c", "weight": 3}]}
    made = Mixture(server, run).revise(**change)
    assert made["sample_index"] == begin
    server.kill()
    server.start()
    with World(server.url(run), RANKS, BATCH, state=state) as world:
        until(world, made["sample_index"] + 40)
        assert {rank.sequence_length for rank in world.ranks} == {4 * LENGTH}
        samples = check(world, revised(course_of(path), made["sample_index"], **change), begin)
        assert {len(sample.ids) for sample in samples} == {4 * LENGTH}
        assert world.ranks[0].total_tokens == (begin + 4 * (world.sample_index - begin)) * LENGTH


def test_a_file_is_compared_with_what_revisions_made_of_it_and_not_with_a_later_phase(
    folder: Path, start_server: StartServer
) -> None:
    run = "filed"
    phases = [{"until_tokens": 2000}, {"until_tokens": 4000, "mixture": NODE | {"policy": "weighted"}}]
    heavier = NODE | {"children": [NODE["children"][0] | {"weight": 5}, *NODE["children"][1:]]}
    server = start_server(write_mixture(folder, run, phases=phases))

    def made() -> list[list[str]]:
        return [each["changes"] for each in Mixture(server, run).read()["revisions"]]

    server.kill()
    write_mixture(folder, run, phases=phases, mixture=heavier)
    server.start_with("--revise", "more of a")
    assert made() == [["a: weight 2 → 5", "until sample 125, where phase 1 begins with a mixture of its own"]]
    # Without the flag, and with it, there is nothing that the file would change.
    for flags in ((), ("--revise", "again")):
        server.kill()
        server.start_with(*flags)
        assert len(made()) == 1
    # In the last phase, too, whose end is no part of the mixture.
    Mixture(server, run).revise(mixture=heavier, sample_index=200)
    server.kill()
    server.start_with()
    # The file that the run began with takes it all back, if that is asked for.
    write_mixture(folder, run, phases=phases)
    server.kill()
    server.start_with("--revise", "as it was")
    assert made()[2:] == [["a: weight 5 → 2"]]


@pytest.mark.parametrize("killed", [False, True])
def test_a_file_that_was_changed_between_two_launches_holds_from_where_the_first_one_stopped(
    folder: Path, start_server: StartServer, killed: bool
) -> None:
    run = f"between-{killed}"
    heavier = NODE | {"children": [NODE["children"][0] | {"weight": 5}, *NODE["children"][1:]]}
    path = write_mixture(folder, run)
    course = course_of(path)
    server = start_server(path, flags=("--liveness", 2))
    with World(server.url(run), RANKS, BATCH) as world:
        until(world, 200)
        if killed:
            server.kill()
    if not killed:
        server.terminate()  # the ranks said goodbye, which the ledger knows
    write_mixture(folder, run, mixture=heavier)
    server.start_with("--revise", "heavier", "--liveness", 2)
    if killed:
        assert "the revision is made in 2 s: ranks of the last launch may come back" in server.log
        wait_for(lambda: Mixture(server, run).read()["revisions"], "the revision")
    committed = server.get(f"/v1/runs/{run}/stats")["sample_index"]
    (made,) = Mixture(server, run).read()["revisions"]
    assert 0 < committed <= 200
    assert (made["sample_index"], made["changes"]) == (committed, ["a: weight 2 → 5"])
    with World(server.url(run), RANKS, BATCH, resume="latest") as world:
        until(world, committed + 100)
        check(world, revised(course, committed, mixture=heavier), committed)


def test_a_source_that_was_preserved_comes_back_from_the_command_line_and_goes_on(
    folder: Path, start_server: StartServer, tokenloom: CommandLine
) -> None:
    run, spec = "came-back", LATE["source"]
    path = write_mixture(folder, run)
    server = start_server(path)
    entries = [
        {"spec": NODE["children"][0]["source"], "row_offset": 0},
        {"spec": spec, "row_offset": 7, "note": "kept"},
    ]
    why = ("--reason", "it is back", "--author", "ada")
    line = f"late: goes on: spec={spec} sample_row=7 shard=late.parquet offset=7"
    with World(server.url(run), RANKS, BATCH, state={"resume_state": {"datasets": entries}}) as world:
        until(world.join(), 10)
        assert json.loads(world.state()["tokenloom"])["resume_state"]["datasets"][-1] == {**entries[1], "unknown": True}
        add = ("mixture", "add", server.rest_url, spec, "--alias", "late", *why)
        assert "late: is read from its first row" in tokenloom(*add, "--from-start", "--dry-run").output
        file = folder / "with-late.yaml"
        document = {**yaml.safe_load(path.read_text()), "mixture": {**NODE, "children": [*NODE["children"], LATE]}}
        file.write_text(yaml.safe_dump(document))
        apply = ("mixture", "apply", server.rest_url, file, "--yes", "--dry-run", *why)
        assert line in tokenloom(*apply).output
        assert "late: is read from its first row" in tokenloom(*apply, "--from-start").output
        assert line in tokenloom(*add).output
        assert line in server.log_path.read_text()
        until(world, 3 * GROUP)
        received = world.receipt.sequence(0)
        state = world.state()
    first = next(sample for sample in received if sample.source == 3)
    assert first.ids[0] == NUMBERS["late"] + 7
    datasets = json.loads(state["tokenloom"])["resume_state"]["datasets"]
    assert [entry["spec"] for entry in datasets] == [*(child["source"] for child in NODE["children"]), spec]
    # A fifth of the samples since, as its weight says: it does not catch up.
    since = received[next(i for i, sample in enumerate(received) if sample.source == 3) :][:200]
    assert abs(sum(sample.source == 3 for sample in since) - 40) <= 2

"""A mixture that changes while ranks train on it: real servers, held against the order that a course gives here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import StartServer
from support.catalog import CATALOG
from support.corpora import write_parquet
from support.server_process import CommandLine, ServerProcess
from support.timelines import revised
from support.trainer import Sample, World, rolling_digest
from tokenloom_server.config import mixture_file as config
from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import SourceChanged
from tokenloom_server.order import builder
from tokenloom_server.order.timeline import Timeline

LENGTH = 16
RANKS, BATCH = 2, 1
#: Samples between two state boundaries of such a generation.
GROUP = 64 * RANKS * BATCH
WINDOW = 16
#: Every token of a row is the row's own number, so that samples tell which rows they are of.
NUMBERS = {"a": 1_000, "b": 10_000, "c": 20_000, "late": 30_000}
NODE = {
    "policy": "least_consumed",
    "children": [
        {"source": "parquet:a-*.parquet:ids", "alias": "a", "weight": 2},
        {"source": "parquet:b.parquet:ids", "alias": "b"},
        {"source": "parquet:c.parquet:ids", "alias": "c"},
    ],
}
HEAVIER = NODE | {"children": [NODE["children"][0] | {"weight": 5}, *NODE["children"][1:]]}
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
    assert (
        rolling_digest(samples, digest=start) == digest_hex(pipeline.state().digest) == world.digest
    )
    return samples


class Mixture:
    """The mixture's routes of one run."""

    def __init__(self, server: ServerProcess, run: str) -> None:
        self._server = server
        self._path = f"/v1/runs/{run}"

    def revise(self, **change: Any) -> dict[str, Any]:
        answer = self._server.request(
            "PATCH", f"{self._path}/mixture", json={"reason": "why", **change}
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def read(self) -> Any:
        return self._server.get(f"{self._path}/mixture")


def until(world: World, sample_index: int) -> World:
    while world.sample_index < sample_index:
        assert world.step() is not None, "the data ended"
    return world


def test_a_change_holds_for_all_ranks_from_the_index_that_was_told_also_where_the_server_is_killed(
    folder: Path, start_server: StartServer, redis_url: str
) -> None:
    run = "changed"
    path = write_mixture(folder, run)
    server = start_server(path, ledger=redis_url)
    mixture = Mixture(server, run)
    change = {
        "set": [{"child": "a", "weight": 0.5}, {"child": "c", "weight": 6}],
        "add": [{"child": LATE}],
    }
    # Not at a state boundary: it comes within a group.
    index = GROUP + 21
    with World(server.url(run), RANKS, BATCH) as world:
        until(world, 20)
        tried = mixture.revise(**change, sample_index=index, dry_run=True)
        made = mixture.revise(**change, sample_index=index, author="ada")
        assert (made["number"], made["sample_index"], made["in_force"]) == (1, index, False)
        assert made["changes"] == tried["changes"]
        assert made["changes"][:2] == ["a: weight 2 → 0.5", "c: weight 1 → 6"]
        assert made["total_tokens"] == index * LENGTH
        assert [each["sample_index"] for each in mixture.read()["revisions"]] == [index], (
            "what was only tried was made"
        )
        assert (
            f"{run}: revision 1 holds from sample {index} on (why): a: weight 2 → 0.5" in server.log
        )
        for depth, status in ((50, 200), (300, 422), (5000, 422)):
            text = (
                '{"reason":"why","dry_run":true,"mixture":'
                + '{"policy":"weighted","children":[' * depth
            )
            text += json.dumps(LATE) + "]}" * depth + "}"
            headers = {"content-type": "application/json"}
            answer = server.request(
                "PATCH", f"/v1/runs/{run}/mixture", content=text, headers=headers
            )
            assert answer.status_code == status, depth
        for stop in (index, index + 40, index + 2 * GROUP):
            until(world, stop)
            server.kill()
            server.start()
            assert len(mixture.read()["revisions"]) == 1
        until(world, index + 3 * GROUP)
        assert {rank.generation for rank in world.ranks} == {1}
        for rank in world.ranks:
            assert [(s.id, s.spec, s.alias) for s in rank.sources][3] == (3, LATE["source"], "late")
    samples = check(world, revised(course_of(path), index, **change))
    for part, weights in ((samples[:index], (2, 1, 1)), (samples[index:], (0.5, 1, 6, 1))):
        for source, weight in enumerate(weights):
            got = sum(sample.source == source for sample in part)
            assert abs(got - len(part) * weight / sum(weights)) <= 1.5
    found = mixture.read()
    assert [(each["author"], each["in_force"]) for each in found["revisions"]] == [("ada", True)]
    assert found["mixture"]["children"][2]["weight"] == 6


def test_a_phase_with_longer_samples_is_joined_again_from_the_state(
    folder: Path, start_server: StartServer
) -> None:
    run = "longer"
    begin = 101
    phases = [{"until_tokens": begin * LENGTH}, {"sequence_length": 4 * LENGTH}]
    path = write_mixture(folder, run, phases=phases, last_micro_step="pad")
    server = start_server(path)
    with World(server.url(run), RANKS, BATCH) as world:
        state = world.run().state()
        reason = world.ranks[0].end_reason
        assert reason is not None
        assert (
            f"sample {begin} begins phase 1, with a sequence length of {4 * LENGTH} instead of {LENGTH}"
            in reason
        )
        check(world, course_of(path))
    with World(server.url(run), RANKS, BATCH, state=state) as world:
        until(world, begin + 40)
        assert {len(sample.ids) for sample in check(world, course_of(path), begin)} == {4 * LENGTH}
        assert world.ranks[0].total_tokens == (begin + 4 * (world.sample_index - begin)) * LENGTH


def test_a_file_is_compared_with_what_revisions_made_of_it_and_not_with_a_later_phase(
    folder: Path, start_server: StartServer
) -> None:
    run = "filed"
    phases = [
        {"until_tokens": 2000},
        {"until_tokens": 4000, "mixture": NODE | {"policy": "weighted"}},
    ]
    server = start_server(write_mixture(folder, run, phases=phases))

    def made() -> list[list[str]]:
        return [each["changes"] for each in Mixture(server, run).read()["revisions"]]

    server.kill()
    write_mixture(folder, run, phases=phases, mixture=HEAVIER)
    server.start_with("--revise", "more of a")
    assert made() == [
        ["a: weight 2 → 5", "until sample 125, where phase 1 begins with a mixture of its own"]
    ]
    # Without the flag there is nothing that the file would change.
    server.kill()
    server.start_with()
    assert len(made()) == 1
    # In the last phase, too, whose end is no part of the mixture.
    Mixture(server, run).revise(mixture=HEAVIER, sample_index=200)
    server.kill()
    # The file that the run began with takes it all back, if that is asked for.
    write_mixture(folder, run, phases=phases)
    server.start_with("--revise", "as it was")
    assert made()[2:] == [["a: weight 5 → 2"]]


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
    with World(
        server.url(run), RANKS, BATCH, state={"resume_state": {"datasets": entries}}
    ) as world:
        until(world.join(), 10)
        assert json.loads(world.state()["tokenloom"])["resume_state"]["datasets"][-1] == {
            **entries[1],
            "unknown": True,
        }
        add = ("mixture", "add", server.rest_url, spec, "alias=late", *why)
        assert (
            "late: is read from its first row"
            in tokenloom(*add, "--from-start", "--dry-run").output
        )
        assert line in tokenloom(*add).output
        assert line in server.log_path.read_text()
        until(world, 3 * GROUP)
        received = world.receipt.sequence(0)
        state = world.state()
    first = next(sample for sample in received if sample.source == 3)
    assert first.ids[0] == NUMBERS["late"] + 7
    datasets = json.loads(state["tokenloom"])["resume_state"]["datasets"]
    assert [entry["spec"] for entry in datasets] == [
        *(child["source"] for child in NODE["children"]),
        spec,
    ]


def test_the_file_of_rows_that_a_revision_left_out_has_to_stay_as_it_was(folder: Path) -> None:
    path, gone = write_mixture(folder, "taken-down"), folder / "gone.csv"
    gone.write_text("spec,shard,row\na,a-0.parquet,0\n", encoding="utf-8")
    timeline = revised(course_of(path), 5, exclude={"file": gone.name})
    gone.write_text("spec,shard,row\na,a-0.parquet,1\n", encoding="utf-8")
    with pytest.raises(SourceChanged, match=r"'gone\.csv' lists the rows that a revision left out"):
        course_of(path).with_revisions(timeline.revisions)

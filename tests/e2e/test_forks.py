"""Runs that begin where another one stands, and runs that move to an empty ledger with all that was changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import LENGTH, SPECS, Corpus, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import World, with_connection
from tokenloom import LaunchOptions, RemoteDataset
from tokenloom_proto.errors import JoinRefused, SnapshotInvalid

ANNEAL = {
    "policy": "weighted",
    "children": [
        {"source": SPECS[3], "alias": "wiki", "weight": 3},
        {"source": SPECS[0], "alias": "code"},
    ],
}


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    """One with all runs of these tests."""
    narrower = {
        "policy": "weighted",
        "children": [{"source": SPECS[3], "alias": "wiki", "epochs": 9}],
    }
    return serve(
        *(corpus.mixture(run) for run in ("base", "twin")),
        *(corpus.mixture(run, mixture=ANNEAL, seed=3) for run in ("anneal", "middle", "refused")),
        corpus.mixture("end", mixture=narrower, phases=[{"until_tokens": 70 * LENGTH}]),
        corpus.mixture("later", mixture=narrower),
    )


@pytest.fixture(scope="module")
def parent(server: ServerProcess) -> RemoteDataset:
    """The run to fork from, behind its sample 40."""
    return trained(server, "base", 20)


def trained(server: ServerProcess, run: str, steps: int, **options: Any) -> RemoteDataset:
    """A trainer of one rank that took so many batches, and is closed."""
    dataset = RemoteDataset(
        server.url(run),
        2,
        rank=0,
        world_size=1,
        **with_connection({"attempt": f"{run}-{steps}", **options}),
    )
    batches = iter(dataset)
    for _ in range(steps):
        next(batches)
    dataset.close()
    return dataset


def test_a_fork_goes_on_with_the_cursors_of_its_parent_under_its_own_mixture(
    corpus: Corpus, server: ServerProcess, parent: RemoteDataset, start_server: StartServer
) -> None:
    state = parent.state_dict()
    with World(server.url("base"), state=state) as world:
        went_on = world.steps(10).receipt.sequence(parent.sample_index)

    fork = RemoteDataset(
        server.url("anneal"),
        2,
        rank=0,
        world_size=1,
        launch=LaunchOptions(attempt="fork", fork_from=state),
    )
    batches = [next(batch) for batch in [iter(fork)] for _ in range(10)]
    assert (fork.sample_index, fork.total_tokens) == (60, 60 * LENGTH)
    # What the parent would have had next of these sources is what the fork has.
    names = {source.id: source.spec for source in fork.sources}
    of_wiki = [
        row.tolist() for batch in batches for row, source in zip(batch["input_ids"], batch["source_ids"], strict=True)
        if names[int(source)] == SPECS[3]
    ]  # fmt: skip
    theirs = [list(sample.ids) for sample in went_on if sample.source == 3]
    assert theirs and of_wiki[: len(theirs)] == theirs[: len(of_wiki)]
    own = json.loads(fork.state_dict()["tokenloom"])
    assert own["run"] == "anneal" and own["resume_state"]["origin"]["run"] == "base"
    fork.close()

    # Its own checkpoint resumes, also behind a restart and on an empty ledger; beginning it again is refused.
    server.kill()
    server.start()
    with pytest.raises(JoinRefused, match="has begun"):
        iter(
            RemoteDataset(
                server.url("anneal"),
                2,
                rank=0,
                world_size=1,
                launch=LaunchOptions(attempt="again", fork_from=state),
            )
        )
    continued = RemoteDataset(
        server.url("anneal"),
        2,
        rank=0,
        world_size=1,
        launch=LaunchOptions(attempt="on", fork_from=state),
    )
    continued.load_state_dict(fork.state_dict())
    expected = next(iter(continued))["input_ids"].tolist()
    continued.close()
    elsewhere = start_server(corpus.folder / "anneal.yaml")
    moved = RemoteDataset(
        elsewhere.url("anneal"), 2, rank=0, world_size=1, launch=LaunchOptions(attempt="moved")
    )
    moved.load_state_dict(fork.state_dict())
    assert next(iter(moved))["input_ids"].tolist() == expected
    moved.close()


def test_a_fork_with_the_same_mixture_is_the_same_data_and_says_so(
    server: ServerProcess, parent: RemoteDataset, tokenloom: CommandLine
) -> None:
    begun = server.get("/v1/runs/base/receipt", sample_index=30)
    done = tokenloom("fork", f"{server.rest_url}/twin", "--from", "base", "--sample", 30)
    assert done.status == 0, done.output
    assert "twin: begins at sample 30" in done.output
    server.kill()
    server.start()
    twin = trained(server, "twin", 5)
    assert (twin.sample_index, twin.digest) == (40, parent.digest)
    assert (
        json.loads(twin.state_dict()["tokenloom"])["resume_state"]["origin"]["digest"]
        == begun["digest"]
    )


def test_what_cannot_be_forked_is_refused(
    corpus: Corpus,
    server: ServerProcess,
    parent: RemoteDataset,
    start_server: StartServer,
    tokenloom: CommandLine,
) -> None:
    state = parent.state_dict()
    with pytest.raises(JoinRefused, match="run 'base' has begun"):
        iter(
            RemoteDataset(
                server.url("base"),
                2,
                rank=0,
                world_size=1,
                launch=LaunchOptions(attempt="self", fork_from=state, takeover=True),
            )
        )
    alone = start_server(corpus.folder / "refused.yaml")
    with pytest.raises(SnapshotInvalid, match="serve its mixture file with this server, too"):
        iter(
            RemoteDataset(
                alone.url("refused"),
                2,
                rank=0,
                world_size=1,
                launch=LaunchOptions(attempt="alone", fork_from=state),
            )
        )
    done = tokenloom("fork", f"{server.rest_url}/refused")
    assert done.status == 2 and "give one of --from and --state" in done.output


def test_a_fork_of_a_fork_goes_on_and_ends_at_the_tokens_of_its_phases(
    server: ServerProcess, parent: RemoteDataset
) -> None:
    child = trained(server, "middle", 10, fork_from=parent.state_dict()).state_dict()
    grandchild = trained(server, "end", 2, fork_from=child)
    assert grandchild.sample_index == 64
    with World(server.url("end"), state=grandchild.state_dict()) as world:
        world.run()
        assert (world.sample_index, world.ranks[0].total_tokens) == (70, 70 * LENGTH)


def test_what_lies_before_a_fork_is_the_other_runs_and_its_report_says_so(
    server: ServerProcess, parent: RemoteDataset, tokenloom: CommandLine
) -> None:
    trained(server, "later", 2, fork_from=parent.state_dict())
    for again in range(2):
        for command in (
            ("peek", f"{server.rest_url}/later", "--documents", "--at", 39),
            ("peek", server.url("later"), "--at", 39),
        ):
            done = tokenloom(*command)
            assert done.status == 2, done.output
            assert (
                "sample 39 lies before sample 40, at which run 'later' was forked from 'base'"
                in done.output
            )
        shown = tokenloom("verify", f"{server.rest_url}/later").output
        assert (
            "The first 40 samples" in shown
            and "are those of `base`, which this run was forked from." in shown
        )
        told = json.loads(tokenloom("verify", f"{server.rest_url}/later", "--json").output)
        own = sum(source["tokens"] for source in told["sources"])
        assert (
            told["parent_run"]["left_tokens"] + own
            == told["total_tokens"]
            == told["sample_index"] * LENGTH
        )
        # Begun again where it was forked, it is a fork still.
        trained(server, "later", 3 + again, resume="fresh", takeover=True)

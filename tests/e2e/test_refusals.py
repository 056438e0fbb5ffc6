"""What a trainer gets wrong, and what a run meets in its files: whom it concerns hears of it, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import LENGTH, Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World
from tokenloom import NotFound, RemoteDataset, ResumePointNeeded, SnapshotInvalid, SourceError
from tokenloom_proto.seal import seal, unseal


def test_a_refused_join_names_what_differs_and_changes_nothing(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    run = "strict"
    server = start_server(corpus.mixture(run), corpus.mixture("other"))
    with World(server.url(run), 2, 2) as world:
        state = world.steps(4).state()
        world.steps(2)
    before = rpc(server).snapshot(run)
    document = unseal(state["tokenloom"])
    with World(server.url("nowhere")) as lost, pytest.raises(NotFound, match=r"'nowhere' .*; it serves: other, strict"):
        lost.join()
    with World(server.url(run)) as stateless, pytest.raises(ResumePointNeeded, match=r"sample 24.*load_state_dict"):
        stateless.join()
    for fields, says in (
        ({"seed": 1}, "seed is 1, this run's is 7: restore the seed"),
        (
            {"tokenizer": document["tokenizer"] | {"engine": "tokenizers"}, "engine_ids": "0" * 32},
            "'tokenizers'.* this run's is .*'gigatoken'",
        ),
        ({"digest": "1" * 32}, "gives digest .*other data"),
    ):
        changed = {"tokenloom": seal(document | fields)}
        with World(server.url(run), state=changed) as wrong, pytest.raises(SnapshotInvalid, match=says):
            wrong.join()
    assert rpc(server).snapshot(run) == before
    with World(server.url(run), state=state) as world:
        assert world.run().receipt.sequence(16) == sequence[16:]


def test_a_bad_line_reaches_every_rank_at_one_step_with_file_and_line_and_no_other_run(
    corpus: Corpus, start_server: StartServer
) -> None:
    good = [json.dumps({"text": f"line number {number} of many"}) for number in range(60)]
    (corpus.folder / "broken.jsonl").write_bytes("\n".join(good).encode() + b'\n{"text": "b\xe4d"}\n')
    mixture = {"policy": "weighted", "children": [{"source": "jsonl:broken.jsonl:text"}]}
    server = start_server(corpus.mixture("broken", mixture=mixture, tokenizer="bytes"), corpus.mixture("beside"))
    with World(server.url("broken"), 2, 3) as world:
        world.join()
        errors, steps = [], []
        for rank in world.ranks:
            count = 0
            with pytest.raises(SourceError) as met:
                for _ in rank:
                    count += 1
            steps.append(count)
            errors.append(str(met.value))
            with pytest.raises(SourceError):  # and again: it is not an end of data
                next(iter(rank))
        short, _, rest = errors[1].partition(" …")
        assert errors[0].startswith(short) and "broken.jsonl" in short
        assert rest == " (every rank gets this; rank 0 says it in full)"
        for part in ("broken.jsonl", "line 61", "UTF-8"):
            assert part in errors[0]
        assert steps[0] == steps[1] > 0
        length = sum(len(json.loads(line)["text"]) + 1 for line in good)
        assert steps[0] * 6 <= length // LENGTH
    assert "Traceback" not in server.log
    with World(server.url("beside")) as world:
        world.steps(3)


def test_what_begins_again_says_so_loudly_and_a_loaded_state_wins(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = start_server(corpus.mixture("again")).url("again")
    warning = "run again: begun again at sample 0 (resume='fresh', no state loaded): what was given before comes again"
    state: dict[str, str] = {}
    # The same two lines in each launch.
    for begin, warnings in ((0, []), (0, [warning]), (16, []), (0, [warning])):
        caplog.clear()
        dataset = RemoteDataset(url, 4, resume="fresh")
        if begin:
            dataset.load_state_dict(state)
        with dataset:
            indices = [batch["sample_index"] for _, batch in zip(range(4), dataset, strict=False)]
            state = dataset.state_dict()
        assert indices == [begin + 4, begin + 8, begin + 12, begin + 16]
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == warnings

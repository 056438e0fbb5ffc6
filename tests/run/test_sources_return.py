"""Sources that come back while a run is served, in forks of it, and after its ledger was lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, flat
from support.served import Place, Trainer, revise
from support.waiting import wait_for
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import SnapshotInvalid

WIKI_ENTRY = {"spec": WIKI, "row_offset": 7, "token_offset": 40}
OLDER = json.dumps(
    {
        "resume_state": {
            "datasets": [
                {"spec": DOCS, "row_offset": 1, "token_offset": 160},
                {"spec": PROSE, "row_offset": 2, "token_offset": 160},
                {"spec": CODE, "shard": "data/code-1.parquet", "row_offset": 3, "token_offset": 83},
                WIKI_ENTRY,
            ]
        }
    }
).encode()
#: Ends a document of ids.
END = 256


@pytest.fixture(autouse=True)
def short_groups(small_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """State boundaries every two steps, so that revisions hold soon."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 2)


def endless(*specs: str, **fields: Any) -> dict[str, Any]:
    document = flat(specs, **fields)
    for child in document["mixture"]["children"]:
        child["epochs"] = "inf"
    return document


@pytest.fixture
def place(made: Callable[..., Place]) -> Place:
    return made(mixture=endless(DOCS, PROSE)["mixture"], window_micro_steps=4)


def datasets(state: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(state)["resume_state"]["datasets"]
    return found


def tokens_of(spec: str, first: int, count: int) -> list[int]:
    """The first tokens of a source of ids, from a row of all its shards on."""
    rows = [row for shard in ROWS[spec] for row in shard][first:]
    return [token for row in rows if row for token in [*row, END]][:count]


def first_of(trainer: Trainer, source: int, count: int = 1) -> list[int]:
    """The ids of the first samples of a source that a trainer got."""
    samples = [
        sample.ids for _, sample in sorted(trainer.taken().items()) if sample.source == source
    ][:count]
    return [token for ids in samples for token in memoryview(ids).cast("H")]


def test_what_came_back_in_a_running_job_is_the_same_after_restarts_restores_and_a_lost_ledger(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served = place.serve()
    trainer = Trainer(served, 1, 2, state=OLDER)
    trainer.train(3)
    before, index = (
        trainer.state(),
        revise(served, add=[{"child": {"source": CODE, "epochs": 9}}]).sample_index,
    )
    assert (
        f"{CODE}: goes on: spec={CODE} sample_row=17 shard=data/code-1.parquet offset=3"
        in caplog.text
    )
    trainer.train_to(index + 40)
    assert first_of(trainer, 2, 2) == tokens_of(CODE, 17, 16)
    assert [entry["spec"] for entry in datasets(trainer.state())] == [DOCS, PROSE, CODE, WIKI]
    whole = trainer.taken()
    for again in (before, trainer.state(index), trainer.state(index + 6)):
        served = place.restart()
        rest = Trainer(served, 2, 1, state=again)
        begin = rest.index
        rest.train((index + 40 - begin) // 2)
        assert rest.taken() == {at: sample for at, sample in whole.items() if at >= begin}
    # What the trainer has says it all.
    place.stop()
    served = place.serve(place.ledger_path.with_name("other.db"))
    moved = Trainer(served, 1, 2, state=trainer.state(index + 6))
    begin = moved.index
    moved.train((index + 40 - begin) // 2)
    assert moved.taken() == {at: sample for at, sample in whole.items() if at >= begin}


def test_a_revision_that_is_to_come_takes_it_once(place: Place) -> None:
    served = place.serve()
    trainer = Trainer(served, 1, 2, state=OLDER)
    trainer.train(2)
    first = revise(served, add=[{"child": {"source": CODE, "alias": "code", "epochs": 9}}])
    later = revise(served, set=[{"child": "code", "weight": 2}], add=[{"child": {"source": WIKI}}])
    assert [len(json.loads(each.content)["returning"]) for each in (first, later)] == [1, 1]
    assert [row[0] for row in json.loads(later.content)["returning"]] == [3]
    trainer.train_to(later.sample_index + 20)
    assert first_of(trainer, 3) == tokens_of(WIKI, 7, 8)


def forked(
    place: Place, trainer: Trainer, run: str, document: dict[str, Any]
) -> tuple[ServedRun, Trainer]:
    path = place.path.with_name(f"{run}-{place.path.name}")
    path.write_text(yaml.safe_dump({**document, "run": run}))
    served = place.runs.add(path, None)
    return served, Trainer(served, 1, 2, state=trainer.state(), fork=True)


def test_a_fork_goes_on_with_what_was_preserved_and_preserves_what_it_leaves_out(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parent = Trainer(place.serve(), 1, 2, state=OLDER)
    parent.train(4)
    document = endless(DOCS, CODE, window_micro_steps=4)
    served, fork = forked(place, parent, "fork", document)
    assert (
        f"resume: spec={CODE} sample_row=17 shard=data/code-1.parquet offset=3 (preserved by run 'test')"
        in caplog.text
    )
    found = datasets(fork.state())
    assert [entry["spec"] for entry in found] == [DOCS, CODE, WIKI, PROSE]
    assert found[2] == {**WIKI_ENTRY, "unknown": True}
    assert (found[3]["left_by"], found[3]["shard"], found[3]["unknown"]) == (
        "test",
        "data/prose/0.txt",
        True,
    )
    fork.train(4)
    assert first_of(fork, 1) == tokens_of(CODE, 17, 8)

    # What the fork left out goes on in it, with the row that had begun.
    index = revise(served, add=[{"child": {"source": PROSE, "epochs": "inf"}}]).sample_index
    fork.train_to(index + 20)
    text = "\0".join(row for shard in ROWS[PROSE] for row in shard[found[3]["row_offset"] :])
    assert (
        first_of(fork, 2)
        == [END if character == "\0" else ord(character) for character in text][:8]
    )
    assert [entry["spec"] for entry in datasets(fork.state())] == [DOCS, CODE, PROSE, WIKI]
    assert [entry.get("unknown", False) for entry in datasets(fork.state())] == [
        False,
        False,
        False,
        True,
    ]

    # A fork of the fork has it all, too.
    _, grandchild = forked(place, fork, "second", endless(WIKI, DOCS, window_micro_steps=4))
    assert first_of_taken(grandchild, 0) == tokens_of(WIKI, 7, 8)
    assert {entry["spec"] for entry in datasets(grandchild.state()) if entry.get("unknown")} == {
        CODE,
        PROSE,
    }


def first_of_taken(trainer: Trainer, source: int) -> list[int]:
    trainer.train(4)
    return first_of(trainer, source)


def test_a_fork_of_a_run_that_the_server_does_not_serve_knows_it_from_the_state(
    place: Place, made: Callable[..., Place]
) -> None:
    parent = Trainer(place.serve(), 1, 2, state=OLDER)
    # At a boundary: without the run's mixture, no sample between two of them can be reached.
    state = parent.state()
    place.stop()
    served = made(**endless(DOCS, CODE, run="fork", window_micro_steps=4)).serve()
    fork = Trainer(served, 1, 2, state=state, fork=True)
    fork.train(4)
    assert first_of(fork, 1) == tokens_of(CODE, 17, 8)
    left = {
        entry["spec"]: entry.get("left_by")
        for entry in datasets(fork.state())
        if entry.get("unknown")
    }
    assert left == {WIKI: None, PROSE: "test"}
    index = revise(
        served, add=[{"child": {"source": PROSE, "epochs": "inf"}}, {"child": {"source": WIKI}}]
    ).sample_index
    fork.train_to(index + 20)
    assert first_of(fork, 3) == tokens_of(WIKI, 7, 8)
    assert not [entry for entry in datasets(fork.state()) if entry.get("unknown")]


def test_a_fork_preserves_a_source_of_which_rows_were_read_and_no_sample_is_the_runs(
    place: Place,
) -> None:
    entries = [
        {"spec": DOCS, "row_offset": 1, "token_offset": 160},
        {"spec": PROSE, "row_offset": 2},
    ]
    older = json.dumps({"resume_state": {"datasets": entries}}).encode()
    parent = Trainer(place.serve(), 1, 2, state=older)
    served, fork = forked(place, parent, "fork", endless(DOCS, CODE, window_micro_steps=4))
    fork.train(2)
    index = revise(served, add=[{"child": {"source": PROSE, "epochs": "inf"}}]).sample_index
    fork.train_to(index + 20)
    text = "\0".join(row for shard in ROWS[PROSE] for row in shard[2:])
    assert (
        first_of(fork, 2)
        == [END if character == "\0" else ord(character) for character in text][:8]
    )


def test_a_source_that_was_dropped_is_not_out_at_the_end(made: Callable[..., Place]) -> None:
    served = made(**flat([DOCS, PROSE, CODE], last_micro_step="pad", window_micro_steps=4)).serve()
    trainer = Trainer(served, 1, 2)
    trainer.train(2)
    revise(served, drop=[PROSE])
    trainer.take(1000)
    wait_for(lambda: served.stats.read().exhausted, "the end")
    docs, prose, code = served.stats.read().sources
    assert [(source.epoch, source.exhausted) for source in (docs, code)] == [(1, True)] * 2
    assert 0 < prose.epoch == prose.rows / sum(map(len, ROWS[PROSE])) < 1
    assert (prose.exhausted, prose.remaining_samples) == (False, 0)


def test_a_fork_in_whose_mixture_it_is_shuffled_is_refused(place: Place) -> None:
    parent = Trainer(place.serve(), 1, 2, state=OLDER)
    parent.train(4)
    document = endless(DOCS, CODE)
    document["mixture"]["children"][1]["shuffle"] = "shards"
    with pytest.raises(
        SnapshotInvalid,
        match=r"shuffle: shards .* or write the spec in another way to begin it anew",
    ):
        forked(place, parent, "fork", document)


def test_a_source_that_the_parent_dropped_goes_on_in_a_fork(place: Place) -> None:
    served = place.serve()
    parent = Trainer(served, 1, 2, state=OLDER)
    parent.train(4)
    index = revise(served, drop=[PROSE]).sample_index
    parent.train_to(index + 8)
    prose = next(entry for entry in datasets(parent.state()) if entry["spec"] == PROSE)
    _, fork = forked(place, parent, "fork", endless(PROSE, DOCS))
    found = datasets(fork.state())[0]
    assert {**found, "id": 1} == prose

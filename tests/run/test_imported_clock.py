"""A run that goes on from an older data loader's checkpoint by that one's token clock: batch sizes, restarts, other
world sizes, the past, and the lines that have another clock."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.corpora import CODE, DOCS, mixture
from support.served import Place, Trainer, call_of, never, revise
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import JoinRefused, OrderMismatch
from tokenloom_server.replay.peek import PeekCall
from tokenloom_server.run.sizing import batch_plans_of
from tokenloom_tools.receipts import Receipts

CLOCK, LENGTH = 100_003, 8
ENTRIES = [
    {
        "spec": CODE,
        "shard": "data/code-1.parquet",
        "row_offset": 3,
        "row_offset_of": "shard",
        "token_offset": 83,
    },
    {"spec": DOCS, "shard": "data/docs.jsonl", "row_offset": 4, "row_offset_of": "shard"},
    {"spec": "parquet:gone:text", "shard": "gone", "row_offset": 1, "token_offset": 5000},
]
DATASETS = {"resume_state": {"datasets": ENTRIES}, "total_tokens": CLOCK}
INDEX = {"sample_index": 41, "total_tokens": CLOCK}


def older(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def total(text: bytes) -> tuple[int, int]:
    document = json.loads(text)
    return document["sample_index"], document["total_tokens"]


@pytest.mark.parametrize("document", [DATASETS, INDEX])
def test_states_restarts_and_other_ranks_go_on_by_the_clock(
    place: Place, served: ServedRun, document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = Trainer(served, 2, 2, state=older(document))
    begin = trainer.index
    assert f"resume: total_tokens={CLOCK} (as the older checkpoint says)" in caplog.messages
    whole = trainer.take(5)
    assert total(trainer.state()) == (begin + 20, CLOCK + 20 * LENGTH)
    middle = trainer.state(begin + 12)
    trainer.settle()
    assert place.committed().total_tokens == CLOCK + 20 * LENGTH
    # The same generation after a restart of the server.
    served = trainer.connect(place.restart())
    whole |= trainer.train(2)
    assert total(trainer.state()) == (begin + 28, CLOCK + 28 * LENGTH)
    assert served.stats.read().total_tokens == CLOCK + 28 * LENGTH
    # From the middle on three ranks; what the ledger says; and once more the older checkpoint.
    again = Trainer(served, 3, 1, state=middle)
    assert again.take(2) == {
        i: sample for i, sample in whole.items() if begin + 12 <= i < begin + 18
    }
    again.settle()
    assert total(again.state()) == (begin + 18, CLOCK + 18 * LENGTH)
    served = place.restart()
    latest = Trainer(served, 1, 5, resume="latest")
    latest.take(2)
    assert total(latest.state()) == (begin + 28, CLOCK + 28 * LENGTH)
    first = Trainer(served, 1, 1, state=older(document))
    first.take(3)
    assert total(first.state()) == (begin + 3, CLOCK + 3 * LENGTH)


@pytest.mark.parametrize("document", [DATASETS, INDEX])
def test_another_ledger_takes_the_clock_from_the_trainers_state(
    place: Place, served: ServedRun, tmp_path: Path, document: dict[str, Any]
) -> None:
    trainer = Trainer(served, state=older(document))
    begin = trainer.index
    revise(served, total_tokens=CLOCK + 400, drop=["docs"])
    revised = served.coordinator.timeline.revisions[0].sample_index
    assert revised == begin + 50
    whole = trainer.take(20)
    # One whose samples were produced when the revision was known.
    state = trainer.state(begin + 44)
    elsewhere = place.serve(tmp_path / "empty.db")
    other = Trainer(elsewhere, 1, 4, state=state)
    rest = other.train(100)
    assert {index: rest[index] for index in whole if index >= begin + 44} == {
        index: sample for index, sample in whole.items() if index >= begin + 44
    }
    assert total(other.state())[1] == CLOCK + (other.index - begin) * LENGTH
    assert elsewhere.coordinator.timeline.tokens_at(revised) == CLOCK + 400


def test_a_run_that_begins_anew_has_a_clock_of_its_own(place: Place, served: ServedRun) -> None:
    plain = Trainer(served, 1, 4)
    samples = plain.train(10)
    own = plain.state()
    imported = Trainer(served, 1, 4, state=older(DATASETS))
    begin = imported.index
    imported.train(4)
    theirs = imported.state()
    fresh = Trainer(served, 1, 4, resume="fresh")
    assert fresh.take(3) == {index: samples[index] for index in range(12)}
    assert total(fresh.state()) == (12, 12 * LENGTH)
    # Each line by its own clock, whichever was the present one before.
    for state, (index, tokens) in (
        (theirs, (begin + 16, CLOCK + 16 * LENGTH)),
        (own, (40, 40 * LENGTH)),
        (theirs, (begin + 16, CLOCK + 16 * LENGTH)),
    ):
        trainer = Trainer(served, 1, 1, state=state)
        trainer.train(1)
        assert total(trainer.state()) == (index + 1, tokens + LENGTH)
        served = place.restart()
        assert served.coordinator.timeline.tokens_at(index) == tokens


def test_the_batch_size_follows_the_clock(place: Place, served: ServedRun) -> None:
    sizes = ((0, 9), (100_000, 2), (CLOCK + 80, 5))
    trainer = Trainer(served, 1, sizes, state=older(DATASETS))
    begin = trainer.index
    opening = place.stored().opening
    assert opening is not None
    assert [(plan.start_index, plan.batch_size) for plan in batch_plans_of(opening).plans] == [
        (begin, 2),
        (begin + 10, 5),
    ]
    trainer.train(6)
    assert total(trainer.state()) == (begin + 15, CLOCK + 15 * LENGTH)


def test_what_is_past_has_the_clock_of_its_line(place: Place, served: ServedRun) -> None:
    trainer = Trainer(served, 1, 2, state=older(DATASETS))
    begin = trainer.index
    trainer.train(10)
    for restart in (False, True):
        if restart:
            served = place.restart()
        text, index = served.snapshots.at(begin + 7)
        assert total(text.encode()) == (index, CLOCK + 7 * LENGTH)
        state = served.past.state_at(begin + 9)[1]
        assert (state.sample_index, state.total_tokens) == (begin + 9, CLOCK + 9 * LENGTH)
        peek = served.peeks.join(
            PeekCall(rank=0, world_size=1, batch_size=1, resume=str(begin + 5), state=b"")
        )
        assert peek[1].total_tokens == CLOCK + 5 * LENGTH
        assert served.companion(Receipts).receipt(begin + 4).total_tokens == CLOCK + 4 * LENGTH
        assert served.companion(Receipts).report().total_tokens == CLOCK + 20 * LENGTH
    # A restore to a sample after it, over some.
    point = served.restores.restore(sample_index=begin + 6, skip_tokens=3 * LENGTH)
    assert (point.sample_index, point.skips) == (begin + 6, {begin + 6: 3})
    after = Trainer(served, 1, 1)
    assert (after.index, total(after.state())) == (begin + 6, (begin + 6, CLOCK + 6 * LENGTH))
    # A generation that is over, once the run has begun anew.
    Trainer(served, 1, 1, resume="fresh").take(1)
    nearest = served.past.in_ledger(begin + 3, 1)
    assert nearest.timeline.tokens_at(begin + 3) == CLOCK + 3 * LENGTH
    assert nearest.state.clock_offset == nearest.timeline.clock_offset == CLOCK - begin * LENGTH


def test_ranks_that_bring_another_clock_are_refused(served: ServedRun) -> None:
    served.join_handler.join(call_of(0, attempt="a", state=older(DATASETS)))
    with pytest.raises(JoinRefused, match="load the same checkpoint on every rank"):
        served.join_handler.join(
            call_of(1, attempt="a", state=older(DATASETS | {"total_tokens": CLOCK + 1}))
        )
    served.join_handler.join(call_of(1, attempt="a", state=older(DATASETS)))


def test_a_peek_that_is_open_stays_on_its_line(served: ServedRun) -> None:
    Trainer(served, 1, 2).train(10)
    peek = PeekCall(rank=0, world_size=1, batch_size=1, resume="5", state=b"")
    served.peeks.join(peek)
    with served.peeks.open(served.coordinator.uid, 5, 1) as stream:
        stream.progress(5, 3)
        before = stream.next(20.0, never)
        Trainer(served, 1, 1, state=older(INDEX))
        stream.progress(8, 3)
        after = stream.next(20.0, never)
    tokens = [mark.total_tokens for delivery in (before, after) for mark in delivery.group.marks]
    assert tokens == [(5 + i + 1) * LENGTH for i in range(len(tokens))]
    # What it remembered is not taken for the line that there is now.
    assert served.peeks.join(peek)[1].total_tokens == CLOCK - 36 * LENGTH
    with (
        pytest.raises(OrderMismatch),
        served.peeks.open(served.coordinator.uid, 5, 1, "0" * 31 + "1") as stream,
    ):
        stream.progress(5, 3)
        stream.next(20.0, never)


def test_revise_on_start_reads_the_mixture_in_force_by_the_clock(made: Any) -> None:
    phases = [{"until_tokens": 90_000}, {"until_tokens": CLOCK + 800}]
    place: Place = made(phases=phases)
    served = place.serve()
    Trainer(served, 1, 2, state=older(DATASETS)).train(3)
    assert [segment.phase for segment in served.coordinator.timeline.segments] == [1]
    revise(served, set=[{"child": "code", "weight": 7}])
    document = mixture(window_micro_steps=6, phases=phases)
    document["mixture"]["children"][0]["weight"] = 7
    place.path.write_text(yaml.safe_dump(document))
    served = place.restart()
    assert Trainer(served, 1, 2, resume="latest").train(3)


@pytest.mark.parametrize("weight", [2, 9])
def test_a_fork_goes_on_by_the_clock_and_its_budget(
    place: Place, served: ServedRun, folder: Path, weight: float
) -> None:
    document = mixture(window_micro_steps=6)
    document["mixture"]["max_tokens"] = CLOCK + 400
    parent_path, fork_path = (folder / f"clock-{name}.yaml" for name in ("parent", "fork"))
    parent_path.write_text(yaml.safe_dump(document | {"run": "parent"}))
    document["mixture"]["children"][0]["weight"] = weight
    fork_path.write_text(yaml.safe_dump(document | {"run": "fork"}))
    trainer = Trainer(place.runs.add(parent_path, None), 1, 2, state=older(DATASETS))
    begin = trainer.index
    trainer.train(2)
    state = trainer.state()
    whole = trainer.train(1000)
    assert total(trainer.state())[1] == CLOCK + 400
    fork = place.runs.add(fork_path, None)
    assert fork.restores.fork(state.decode()).sample_index == begin + 4
    forked = Trainer(fork, 1, 2)
    assert total(forked.state()) == (begin + 4, CLOCK + 4 * LENGTH)
    rest = forked.train(1000)
    if weight == 2:  # the same mixture
        assert rest == {index: sample for index, sample in whole.items() if index >= begin + 4}
    assert total(forked.state())[1] == CLOCK + 400
    text, index = fork.snapshots.at(begin + 10)
    assert total(text.encode()) == (index, CLOCK + 10 * LENGTH)

"""Skips: a restore passes over samples from a sample index on, and every launch that comes there does so again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.corpora import CODE, DOCS, PROSE, WIKI, flat, mixture
from support.served import RUN, Place, Sample, Trainer, call_of, part, recount, revise, sequence
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core.state import SourceState
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    JoinRefused,
    LimitExceeded,
    NotFound,
    SnapshotInvalid,
)
from tokenloom_server.ledger.records import Opening
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.run.pins import PinnedPoint

Made = Callable[..., Place]


#: In turn, until the run's clock says so.
BUDGET = flat([CODE, DOCS, PROSE, WIKI], "round_robin")["mixture"] | {"max_tokens": 480}


def without(samples: list[Sample], *ranges: tuple[int, int]) -> list[Sample]:
    """What is given where ranges of these are passed over: indices go on without a gap."""
    return [
        sample
        for i, sample in enumerate(samples)
        if not any(first <= i < end for first, end in ranges)
    ]


def test_every_launch_passes_over_the_range_until_a_state_without_it_takes_it_back(
    made: Made,
) -> None:
    place = made(packing="none", sequence_length=16, pad_id=3)
    served = place.serve()
    samples = sequence(served)
    trainer = Trainer(served)
    trainer.train(10)
    with pytest.raises(ConfigError, match=r"names one of .*, but 0 are given"):
        served.restores.restore()
    early, checkpoint, between, late = map(trainer.state, (12, 20, 24, 36))
    # The present generation goes on.
    served.restores.restore(text=checkpoint.decode(), skip_samples=7)
    assert trainer.take(1) == part(samples, 40, 44)
    given = without(samples, (20, 27))
    for state, index, world_size, batch_size in (
        (checkpoint, 20, 2, 2),
        (early, 12, 3, 1),
        (early, 12, 1, 5),
    ):
        served = place.restart()
        again = Trainer(served, world_size, batch_size, state=state)
        assert again.take(9) == part(given, index, index + 9 * world_size * batch_size)
        assert again.state().decode() == served.snapshots.at(again.index)[0]
        counts = json.loads(again.state())["counts"].values()
        assert sum(count["samples"] for count in counts) == again.index
        assert 0 < sum(count["real_tokens"] for count in counts) < again.index * 16
    with pytest.raises(
        ConfigError,
        match=r"at sample 57 passed all skips of the run \(at samples \[20\]\).* --sample",
    ):
        served.restores.restore(sample_index=again.index, undo_skip=True)
    for without_it in (between, late):
        with pytest.raises(
            SnapshotInvalid, match=r"at sample 20 this run passes over 7 .* --undo-skip"
        ):
            Trainer(served, state=without_it)
        pinned = served.restores.restore(text=without_it.decode(), undo_skip=True)
        assert (served.stats.read().pin, pinned.skips) == (pinned, {})
        assert served.restores.cancel() == pinned
    served.restores.restore(text=between.decode(), undo_skip=True)
    assert Trainer(place.restart(), 1, 4, state=between).take(2) == part(samples, 24, 32)
    with pytest.raises(
        SnapshotInvalid, match=r"at sample 20 this run passes over 0 .* a line that passed over 7"
    ):
        Trainer(place.runs.get(RUN), state=again.state())


def test_an_empty_ledger_takes_skips_from_a_trainers_state(
    place: Place, served: ServedRun, tmp_path: Path
) -> None:
    given = without(sequence(served), (20, 27), (47, 51))
    Trainer(served).train(5)
    for index, skipped in ((20, 7), (40, 4)):
        served.restores.restore(sample_index=index, skip_samples=skipped)
        Trainer(served).take(10)
    trainer = Trainer(served, 1, 4, resume="fresh")
    trainer.take(12)
    for index in (4, 20, 24, 44):
        place.stop()
        moved = Trainer(
            place.serve(tmp_path / f"elsewhere-{index}.db"), 1, 5, state=trainer.state(index)
        )
        assert moved.train(10) == part(given, index, index + 50)


def test_an_empty_ledger_takes_a_skip_after_a_revision_from_a_trainers_state(
    place: Place, served: ServedRun, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.train(3)
    revised = revise(served, set=[{"child": "code", "weight": 0.1}]).sample_index
    trainer.train_to(revised + 20)
    served.restores.restore(sample_index=revised + 8, skip_samples=7)
    trainer = Trainer(served)
    given = trainer.take(8)
    place.stop()
    moved = Trainer(place.serve(tmp_path / "elsewhere.db"), 1, 4, state=trainer.state(revised + 16))
    assert moved.train(4) == part(given, revised + 16, revised + 32)


@pytest.mark.parametrize("fields", [{}, {"mixture": BUDGET}])
def test_a_fork_inherits_what_its_parent_passes_over(
    made: Made, fields: dict[str, Any], tmp_path: Path
) -> None:
    place = made(**fields)
    served = place.serve()
    plain = Trainer(served)
    plain.train(10)
    served.restores.restore(sample_index=20, skip_samples=7)
    Trainer(served).take(5)
    whole = Trainer(served, resume="fresh")
    given = whole.take(1000)
    states = {
        name: trainer.state(index) for name, trainer, index in (("b", whole, 12), ("a", whole, 28))
    }
    served.restores.restore(text=states["b"].decode())
    # Of a parent that is not served: where a state says itself how all stands there.
    states |= {"before": Trainer(served).state(12), "at": plain.state(20)}
    if not fields:
        states["other"] = states["at"]
    for name, state in states.items():
        path = place.path.with_name(f"{name}-{place.path.name}")
        document = mixture(run=name, window_micro_steps=6, **fields)
        if name == "other":  # a mixture that is not its parent's, and gives the same
            document["mixture"]["children"][0]["max_tokens"] = 10**12
        path.write_text(yaml.safe_dump(document))
        fork = Trainer(place.runs.add(path, None), 1, 2, state=state, fork=True)
        assert fork.take(1000) == {
            index: given[index] for index in given if index >= min(fork.taken())
        }, name
    place.stop()
    alone = Place(place.path.parent, tmp_path, mixture(run="alone", window_micro_steps=6, **fields))
    fork = Trainer(alone.serve(), 1, 2, state=states["before"], fork=True)
    assert fork.take(1000) == {index: given[index] for index in given if index >= 12}
    alone.stop()


def test_a_skip_that_was_pinned_before_a_revision_stays_one_of_its_samples(made: Made) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    samples = sequence(served)
    Trainer(served, 1, 1).train_to(8)
    served.restores.restore(sample_index=8, skip_samples=60)
    index = revise(served, drop=[PROSE]).sample_index
    assert 8 < index < 60
    taken = Trainer(served, 1, 1).train_to(90).taken()
    assert {at: taken[at] for at in range(8, index)} == part(without(samples, (8, 68)), 8, index)
    assert 2 not in {sample.source for at, sample in taken.items() if at >= index}
    # A revision of a later index than the skip's is not dropped with it, nor is the skip with a revision.
    with pytest.raises(BeyondHorizon, match="revision 2 holds from sample 8 on"):
        served.revision_handler.drop(1)
    with pytest.raises(ConfigError, match=f"revision 1 holds from sample {index} on"):
        revise(served, drop=[PROSE], sample_index=index - 1)


def sources_at(order: PipelineFactory, index: int) -> Sequence[SourceState]:
    pipeline = order.pipeline(order.initial())
    pipeline.advance(index)
    return pipeline.state().sources


def test_what_is_counted_after_a_skip_is_a_recount_at_every_index(
    place: Place, served: ServedRun
) -> None:
    samples, order = sequence(served), served.coordinator.order
    first = Trainer(served, 1, 1).train_to(175)
    for begin, end in ((0, 61), (9, 10), (58, 174)):
        text = first.state(begin)
        point = served.restores.restore(
            text=text.decode(), skip_samples=end - begin, undo_skip=True
        )
        assert (point.sample_index, point.skips) == (begin, {begin: end - begin})
        rest = Trainer(served, 1, 1)
        given = without(samples, (begin, end))
        assert rest.train(1000) == part(given, begin, len(given))
        for index in range(begin, len(given), 11):
            state = rest.state(index)
            assert served.snapshots.at(index) == (state.decode(), index)
            counts = {
                spec: (of["samples"], of["tokens"])
                for spec, of in json.loads(state)["counts"].items()
            }
            expected = recount(served, part(given, 0, index))
            assert counts == {spec: of for spec, of in expected.items() if of[0]}
        assert place.counters() == recount(served, part(given, 0, len(given)))
        # Rows, and what was skipped, by the order without a skip.
        stats, before, after, last = (
            served.stats.read(),
            *(sources_at(order, index) for index in (begin, end, 175)),
        )
        for source, was, now, all_of_it in zip(stats.sources, before, after, last, strict=True):
            skipped = now.samples - was.samples, now.rows - was.rows
            assert (source.skipped_samples, source.skipped_rows) == skipped
            assert (source.samples + skipped[0], source.rows + skipped[1]) == (
                all_of_it.samples,
                all_of_it.rows,
            )
        assert (stats.total_tokens, stats.skipped_tokens) == (8 * len(given), 8 * (end - begin))


OLDER = {"spec": CODE, "shard": "data/code-1.parquet", "row_offset": 3, "token_offset": 83}


@pytest.mark.parametrize(
    "document", [{"resume_state": {"datasets": [OLDER]}}, {"sample_index": 41}]
)
def test_ranks_with_an_older_loaders_checkpoint_agree_after_a_restart_and_may_skip_what_follows_it(
    place: Place, served: ServedRun, document: dict[str, Any]
) -> None:
    older = json.dumps(document).encode()
    whole = Trainer(served, 1, 1, state=older).train(1000)
    begin = min(whole)
    assert served.restores.restore(text=older.decode(), skip_samples=7).sample_index == begin
    served.join_handler.join(call_of(0, attempt="b", state=older))
    served = place.restart()
    with pytest.raises(JoinRefused, match="load the same checkpoint on every rank"):
        served.join_handler.join(call_of(1, attempt="b", state=b'{"sample_index": 40}'))
    with pytest.raises(LimitExceeded, match="one restore goes forward through"):
        served.restores.restore(text=older.decode(), skip_tokens=2**35)
    assert (
        served.join_handler.join(call_of(1, attempt="b", state=older)).opening.start_index == begin
    )
    rest = Trainer(served, 1, 1, resume="latest").take(1000)
    assert rest == {index - 7: sample for index, sample in whole.items() if index >= begin + 7}
    assert served.restores.restore(text=older.decode(), undo_skip=True).skips == {}


def test_an_older_loaders_checkpoint_beyond_a_skip_is_refused_with_a_choice_that_works(
    served: ServedRun,
) -> None:
    # 14.16
    older = json.dumps({"resume_state": {"datasets": [OLDER]}}).encode()
    whole = Trainer(served, 1, 1, state=older).train(1000)
    served.restores.restore(
        text=Trainer(served, resume="fresh", takeover=True).state().decode(), skip_samples=3
    )
    Trainer(served, takeover=True).train(1)
    with pytest.raises(
        SnapshotInvalid,
        match=rf"at sample 0 .* the state at sample {min(whole)} .* passed over 0: res",
    ):
        Trainer(served, 1, 1, state=older, takeover=True)
    served.restores.restore(text=older.decode(), undo_skip=True)
    assert Trainer(served, 1, 1, state=older, takeover=True).train(1000) == whole


def test_a_snapshot_that_is_made_while_a_generation_with_a_skip_is_opened_is_of_one_line(
    served: ServedRun, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train(64)
    served.restores.restore(sample_index=2, skip_samples=3)
    openings = served.past.openings

    def read_before_an_opening() -> Sequence[Opening]:
        monkeypatch.setattr(served.past, "openings", openings)
        known = openings()
        Trainer(served).train(80)
        return known

    monkeypatch.setattr(served.past, "openings", read_before_an_opening)
    text, index = served.snapshots.at(58)
    assert (
        served.resume_points.forward(served.resume_points.parse(text)).sample_index == index == 58
    )


def test_a_restore_that_went_forward_while_a_skip_was_opened_keeps_the_skip(
    served: ServedRun, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = sequence(served)
    trainer.train(10)
    pin = served.restores.proven

    def while_another_is_opened(*args: Any) -> PinnedPoint:
        monkeypatch.setattr(served.restores, "proven", pin)
        pinned = pin(*args)
        served.restores.restore(sample_index=20, skip_samples=7)
        Trainer(served).take(3)
        return pinned

    monkeypatch.setattr(served.restores, "proven", while_another_is_opened)
    assert served.restores.restore(sample_index=12, skip_samples=3).skips == {12: 3, 17: 7}
    assert Trainer(served).take(9) == part(without(samples, (12, 15), (20, 27)), 12, 48)


@pytest.mark.parametrize("index", [0, 13])
def test_a_skip_is_taken_back_at_its_own_sample(
    place: Place, served: ServedRun, trainer: Trainer, index: int
) -> None:
    samples = sequence(served)
    trainer.train(10)
    for skipped in (7, 2):
        served.restores.restore(sample_index=index, skip_samples=skipped)
        again = Trainer(served)
        again.train(9)
    for point in ({"sample_index": index + 1}, {"text": again.state(index).decode()}):
        with pytest.raises(
            ConfigError, match=rf"passed all skips of the run \(at samples \[{index}\]\)"
        ):
            served.restores.restore(**point, undo_skip=True)
    served = place.restart()
    assert served.restores.restore(sample_index=index, undo_skip=True, skip_samples=1).skips == {
        index: 1
    }
    assert served.restores.restore(sample_index=index, undo_skip=True).skips == {}
    assert Trainer(served).take(5) == part(samples, index, index + 20)


def test_a_pin_can_be_taken_back_and_both_are_shown(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    samples = sequence(served)
    trainer.train(10)
    assert served.stats.read().pin is None
    with pytest.raises(NotFound, match="nothing is pinned for the next launch of run 'test'"):
        served.restores.cancel()
    pinned = served.restores.restore(sample_index=20, skip_samples=7)
    served = place.restart()
    assert served.stats.read().pin == pinned
    assert served.restores.cancel() == pinned
    assert (served.stats.read().pin, place.stored().pin) == (None, None)
    assert Trainer(served, state=trainer.state(20)).take(2) == part(samples, 20, 28)
    served.restores.restore(sample_index=24, skip_samples=2)
    Trainer(served)
    stats = served.stats.read()
    assert (stats.pin, stats.skips) == (None, {24: 2})

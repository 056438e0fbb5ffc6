"""Skips: a restore passes over samples from a sample index on, and every launch that comes there does so again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.corpora import CODE, DOCS, PROSE, WIKI, mixture
from support.served import RUN, Place, Sample, Trainer, call_of, never, part, sequence
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    JoinRefused,
    LimitExceeded,
    NotFound,
    SnapshotInvalid,
)
from tokenloom_server.ledger.commands import Pin
from tokenloom_server.replay.peek import PeekCall


def without(samples: list[Sample], *ranges: tuple[int, int]) -> list[Sample]:
    """What is given where ranges of these are passed over: indices go on without a gap."""
    return [sample for i, sample in enumerate(samples) if not any(first <= i < end for first, end in ranges)]


def datasets(text: str | bytes) -> Any:
    return json.loads(text)["resume_state"]["datasets"]


def consumed_and_skipped(place: Place) -> dict[str, tuple[int, int, int, int]]:
    """By spec: samples and rows that the ledger counts, and those that are reported as skipped."""
    counters = place.committed().counters
    return {
        source.spec: (
            counters[source.spec].samples,
            counters[source.spec].rows,
            source.skipped_samples,
            source.skipped_rows,
        )
        for source in place.runs.get(RUN).stats.read().sources
    }


@pytest.mark.parametrize("end", [10, 61, 174])
def test_any_range_after_any_point_can_be_skipped(place: Place, served: ServedRun, end: int) -> None:
    samples, order = sequence(served), served.coordinator.order
    first = Trainer(served, 1, 1)
    first.train(175)
    states = {begin: first.state(begin) for begin in (0, end // 3, end - 1)}
    for begin in states:
        point = served.start_points.restore(text=states[begin].decode(), skip_samples=end - begin, undo_skip=True)
        assert (point.sample_index, point.skips) == (begin, {begin: end - begin})
        rest = Trainer(served, world_size=1, batch_size=1)
        assert rest.ranks[0].joined.opening.start_index == begin
        given = without(samples, (begin, end))
        assert rest.train(1000) == part(given, begin, len(given))
        counted = []
        for index in (begin, end, 175):
            pipeline = order.pipeline(order.initial())
            pipeline.advance(index)
            counted.append(pipeline.state().sources)
        for spec, before, after, last in zip(order.record.specs, *counted, strict=True):
            skipped = after.samples - before.samples, after.rows - before.rows
            assert consumed_and_skipped(place)[spec] == (last.samples - skipped[0], last.rows - skipped[1], *skipped)
        assert served.stats.read().total_tokens == 8 * len(given)
        # The generation's own snapshots carry it on, whichever index they are at.
        text, _ = served.history.snapshot(min(begin + 3, len(given)))
        assert sum(entry.get("skipped_samples", 0) for entry in datasets(text)) == end - begin


def test_a_job_that_dies_before_its_next_save_does_not_get_the_bad_range_back(
    place: Place, served: ServedRun, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    samples = sequence(served)
    trainer.train(10)
    early, checkpoint, late = trainer.state(12), trainer.state(20), trainer.state(36)
    served.start_points.restore(text=checkpoint.decode(), skip_samples=7)
    given = without(samples, (20, 27))
    # The present generation goes on; the pin, and the skip with it, outlast the server.
    assert trainer.take(1) == part(samples, 40, 44)
    served = place.restart()
    assert served.stats.read().skips == {}
    assert not served.coordinator.timeline.revisions
    caplog.set_level(logging.INFO)
    first = Trainer(served, state=checkpoint)
    assert "at sample 20, 7 samples of the order are passed over" in caplog.text
    assert place.stored().pin is None
    assert first.take(2) == part(given, 20, 28)
    begun = first.state(20)
    # The same checkpoint, an earlier one, other ranks and batch sizes, in the midst of a micro-step, after a restart.
    for state, index, world_size, batch_size in (
        (checkpoint, 20, 2, 2), (early, 12, 3, 1), (early, 12, 1, 5), (begun, 20, 1, 3), (checkpoint, 20, 4, 1)
    ):  # fmt: skip
        served = place.restart()
        again = Trainer(served, world_size, batch_size, state=state)
        assert again.index == index
        taken = again.take(9)
        assert taken == part(given, index, index + 9 * world_size * batch_size)
        at = again.state()
        assert at.decode() == served.history.snapshot(again.index)[0]
        assert json.loads(at)["total_tokens"] == again.index * 8
    assert Trainer(served, resume="fresh").take(9) == part(given, 0, 36)
    # What was taken without it, beyond it, is refused with the choice.
    with pytest.raises(SnapshotInvalid, match=r"at sample 20 this run passes over 7 .* restore to sample 20 or before"):
        Trainer(served, state=late)
    with pytest.raises(SnapshotInvalid, match="restore --undo-skip"):
        served.start_points.restore(text=late.decode())


def test_a_skip_can_be_taken_back_with_a_state_that_was_taken_without_it(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    samples = sequence(served)
    trainer.train(10)
    checkpoint, late, between = trainer.state(20), trainer.state(40), trainer.state(24)
    served.start_points.restore(text=checkpoint.decode(), skip_samples=7)
    skipping = Trainer(served, state=checkpoint)
    skipping.take(3)
    state = skipping.state()
    for text in (late, between):
        served.start_points.restore(text=text.decode(), undo_skip=True)
        served = place.restart()
        index = json.loads(text)["sample_index"]
        assert Trainer(served, 1, 4, state=text).take(2) == part(samples, index, index + 8)
        assert served.stats.read().skips == {}
        # Now the states that passed it are of another line; and the skip is made anew.
        with pytest.raises(SnapshotInvalid, match=r"at sample 20 this run passes over 0 .* a line that passed over 7"):
            Trainer(served, state=state)
        served.start_points.restore(text=checkpoint.decode(), skip_samples=7)
        assert Trainer(served).take(1) == part(without(samples, (20, 27)), 20, 24)
    assert [revision.changes for revision in served.mixture.info().revisions][:2] == [
        ["at sample 20, 7 samples of the order are passed over"],
        ["nothing of the order is passed over any more"],
    ]


def test_skips_at_one_sample_and_before_one_another(place: Place, served: ServedRun, trainer: Trainer) -> None:
    samples = sequence(served)
    trainer.train(20)
    states = {index: trainer.state(index) for index in (20, 60)}
    served.start_points.restore(text=states[60].decode(), skip_samples=10)
    Trainer(served).take(1)
    served.start_points.restore(text=states[60].decode(), skip_samples=3)
    twice = Trainer(served)
    given = without(samples, (60, 73))
    assert twice.take(3) == part(given, 60, 72)
    # Before it: its range stays where it lies.
    served.start_points.restore(text=states[20].decode(), skip_samples=5)
    given = without(samples, (20, 25), (60, 73))
    for state in ("", states[20]):
        served = place.restart()
        nested = Trainer(served, state=state or b"", resume="" if state else "fresh") if state else Trainer(served)
        assert nested.train(14) == part(given, 20, 76)
    assert served.stats.read().skips == {20: 5, 55: 13}
    assert Trainer(place.restart(), 3, 2, state=nested.state(56)).take(3) == part(given, 56, 74)


def test_ranks_whose_state_stands_at_a_skip_agree_also_after_a_restart(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(3)
    late, early = trainer.state(), trainer.state(4)
    place.runs.get(RUN).start_points.restore(text=late.decode(), skip_samples=5)
    served.join_handler.join(call_of(0, attempt="b", state=late))
    for _ in range(2):
        with pytest.raises(JoinRefused, match=r"a loaded state at sample 4 .* sample 12 .*same checkpoint on every"):
            served.join_handler.join(call_of(1, attempt="b", state=early))
        served = place.restart()
    joined = served.join_handler.join(call_of(1, attempt="b", state=late))
    assert (joined.opening.start_index, joined.opening.skipped) == (12, 0)
    with pytest.raises(BeyondHorizon, match="4000 samples cannot be passed over at sample 12: the order has"):
        place.runs.get(RUN).start_points.restore(sample_index=12, skip_samples=4000)
    with pytest.raises(LimitExceeded, match="one restore goes forward through"):
        place.runs.get(RUN).start_points.restore(sample_index=12, skip_tokens=2**35)
    with pytest.raises(ConfigError, match="a restore skips 1 samples and 1 tokens: give one of them"):
        place.runs.get(RUN).start_points.restore(sample_index=12, skip_samples=1, skip_tokens=1)
    assert place.stored().pin is None


OLDER = {"spec": CODE, "shard": "data/code-1.parquet", "row_offset": 3, "token_offset": 83}


@pytest.mark.parametrize("document", [{"resume_state": {"datasets": [OLDER]}}, {"sample_index": 41}])
def test_ranks_with_an_older_loaders_checkpoint_agree_after_a_restart_and_may_skip_what_follows_it(
    place: Place, served: ServedRun, document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    older = json.dumps(document).encode()
    caplog.set_level(logging.INFO)
    whole = Trainer(served, 1, 1, state=older).train(1000)
    begin = min(whole)
    assert any("from an older checkpoint" in message for message in caplog.messages)
    assert served.start_points.restore(text=older.decode(), skip_samples=7).sample_index == begin
    served.join_handler.join(call_of(0, attempt="b", state=older))
    served = place.restart()
    with pytest.raises(JoinRefused, match="load the same checkpoint on every rank"):
        served.join_handler.join(call_of(1, attempt="b", state=b'{"sample_index": 40}'))
    assert served.join_handler.join(call_of(1, attempt="b", state=older)).opening.start_index == begin
    rest = Trainer(served, 1, 1, resume="latest").take(1000)
    assert rest == {index - 7: sample for index, sample in whole.items() if index >= begin + 7}


def test_a_peek_does_not_take_its_states_from_a_line_that_was_left(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(10)
    call = PeekCall(rank=0, world_size=1, batch_size=1, resume="60", state=b"")
    assert sum(source.skipped_samples for source in served.peeks.join(call, never)[1].sources) == 0
    place.runs.get(RUN).start_points.restore(sample_index=20, skip_samples=10)
    Trainer(served).take(1)
    generation, state = served.peeks.join(call, never)
    assert (generation, state.sample_index) == (2, 60)
    assert sum(source.skipped_samples for source in state.sources) == 10


def test_a_pin_can_be_taken_back_and_both_are_shown(place: Place, served: ServedRun, trainer: Trainer) -> None:
    samples = sequence(served)
    trainer.train(10)
    assert served.stats.read().pin is None
    with pytest.raises(NotFound, match="nothing is pinned for the next launch of run 'test'"):
        served.start_points.cancel()
    pinned = served.start_points.restore(sample_index=20, skip_samples=7)
    served = place.restart()
    assert served.stats.read().pin == pinned
    assert served.start_points.cancel() == pinned
    assert (served.stats.read().pin, place.stored().pin) == (None, None)
    assert Trainer(served, state=trainer.state(20)).take(2) == part(samples, 20, 28)
    served.start_points.restore(sample_index=24, skip_samples=2)
    Trainer(served)
    stats = served.stats.read()
    assert (stats.pin, stats.skips) == (None, {24: 2})


def test_an_empty_ledger_takes_skips_from_a_trainers_state_before_at_and_after_them(
    place: Place, served: ServedRun, trainer: Trainer, tmp_path: Path
) -> None:
    samples = sequence(served)
    trainer.train(5)
    served.start_points.restore(sample_index=20, skip_samples=7)
    trainer = Trainer(served)
    trainer.take(10)
    served.start_points.restore(sample_index=40, skip_samples=4)
    second = Trainer(served)
    second.take(2)
    given = without(samples, (20, 27), (47, 51))
    third = Trainer(served, 1, 4, resume="fresh")
    third.take(8)
    states = [third.state(index) for index in (4, 20, 24)] + [second.state()]
    for number, state in enumerate(states):
        place.stop()
        elsewhere = place.serve(tmp_path / f"elsewhere-{number}.db")
        index = json.loads(state)["sample_index"]
        moved = Trainer(elsewhere, 1, 5, state=state)
        assert moved.train(10) == part(given, index, index + 50)
        again = Trainer(place.restart(), 2, 1, state=state)
        assert again.take(5) == part(given, index, index + 10)


def test_a_fork_inherits_what_its_parent_passes_over(made: Callable[..., Place]) -> None:
    place = made()
    served = place.serve()
    samples = sequence(served)
    Trainer(served).train(10)
    served.start_points.restore(sample_index=20, skip_samples=7)
    Trainer(served).take(5)
    whole = Trainer(served, resume="fresh")
    whole.take(9)
    given = without(samples, (20, 27))
    for name, index in (("before", 12), ("at", 20), ("after", 28)):
        path = place.path.with_name(f"{name}-{place.path.name}")
        path.write_text(yaml.safe_dump(mixture(run=name, window_micro_steps=6)))
        fork = Trainer(place.runs.add(path, None), 1, 2, state=whole.state(index), fork=True)
        assert fork.take(20) == part(given, index, index + 40), name


def test_a_skip_that_was_pinned_before_a_revision_stays_one_of_its_samples(made: Callable[..., Place]) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    samples = sequence(served)
    trainer = Trainer(served, 1, 1).train_to(8)
    served.start_points.restore(sample_index=8, skip_samples=60)
    change = {"reason": "a test", "drop": [PROSE]}
    index = served.revision_handler.revise(MixtureChange.model_validate(change)).sample_index
    assert 8 < index < 60
    after = Trainer(served, 1, 1).train_to(90)
    assert part(after.taken(), 8, index) == part(without(samples, (8, 68)), 8, index)
    assert 2 not in {sample.source for at, sample in after.taken().items() if at >= index}
    assert digest_hex(after.ranks[0].joined.start.digest) == json.loads(trainer.state(8))["digest"]
    # A revision of a later index than the skip's is not dropped with it, nor is the skip with a revision.
    with pytest.raises(BeyondHorizon, match="revision 2 holds from sample 8 on"):
        served.revision_handler.drop(1)
    with pytest.raises(ConfigError, match=f"revision 1 holds from sample {index} on"):
        served.revision_handler.revise(MixtureChange.model_validate(change | {"sample_index": index - 1}))


def test_a_pin_and_an_opening_of_a_release_that_jumped_over_samples_are_still_read(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    samples = sequence(served)
    trainer.train(10)
    run = served.coordinator
    text = trainer.state(20).decode()
    pin = json.dumps({"revisions": [], "skipped": 7, "snapshot": text, "start": "…"})
    run.ledger.execute(Pin(run.uid, run.stream, run.lease.epoch, pin))
    served = place.restart()
    assert served.stats.read().pin is not None
    assert Trainer(served).take(2) == part(without(samples, (20, 27)), 20, 28)
    assert {DOCS, WIKI} <= {source.spec for source in served.stats.read().sources}


def test_padding_that_was_passed_over_is_in_no_count(made: Callable[..., Place]) -> None:
    place = made(packing="none", sequence_length=16, pad_id=3)
    served = place.serve()
    trainer = Trainer(served)
    trainer.take(8)
    served.start_points.restore(text=trainer.state(12).decode(), skip_samples=9)
    Trainer(served)
    after = Trainer(served, 1, 3, state=trainer.state(8))
    after.take(6)
    for index in (11, 14, 26):
        state = after.state(index)
        counts = json.loads(state)["counts"].values()
        assert sum(count["samples"] for count in counts) == index
        assert (
            0 < sum(count["real_tokens"] for count in counts) < sum(count["tokens"] for count in counts) == index * 16
        )
        assert Trainer(place.restart(), state=state).take(1)

"""What each source gave, as states say it: at exactly their sample index, on every rank alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, DOCS, PROSE, WIKI, flat
from support.features import document, write_features
from support.served import Place, Sample, Trainer, serving
from tokenloom_proto.seal import seal, unseal
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import SnapshotInvalid

RANKS, BATCH = 4, 2


@pytest.fixture(autouse=True)
def groups_of_six(small_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 samples of four ranks lie between two state boundaries: sample 320 lies between 288 and 336."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 6)


def recount(served: ServedRun, samples: dict[int, Sample], end: int) -> dict[str, dict[str, int]]:
    """By spec, from the samples as ranks got them."""
    timeline, counts = served.coordinator.timeline, dict[str, dict[str, int]]()
    for index in range(end):
        order, sample = timeline.at(index), samples[index]
        form = order.form
        real = 1
        if order.config.batching is None:
            # Of a padded sample those of its ids that are inputs, too.
            ids = len(form.ids(sample.ids))
            real = (
                ids - (form.width - form.length)
                if form.padding == "left"
                else min(ids, form.length)
            )
        spec = timeline.segments[-1].factory.record.specs[sample.source]
        own = counts.setdefault(spec, {"samples": 0, "tokens": 0, "real_tokens": 0})
        for field, more in (
            ("samples", 1),
            ("tokens", order.config.sequence_length),
            ("real_tokens", real),
        ):
            own[field] += more
    return counts


def counts_in(text: str | bytes) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = unseal(text)["counts"]
    return counts


def changed(text: bytes, **fields: Any) -> bytes:
    return seal(unseal(text) | fields).encode()


def epochs(document: dict[str, Any], count: float = 3) -> dict[str, Any]:
    for child in document["mixture"]["children"]:
        child["epochs"] = count
    return document


RUNS: dict[str, dict[str, Any]] = {
    "always full": {},
    "tail padded, shifted": {"tail": "pad", "pad_id": 0, "labels": "shifted"},
    "best fit": {"packing": "best_fit", "pack_window_rows": 9, "pad_id": 0},
    "none, left, shifted": {"packing": "none", "padding": "left", "labels": "shifted", "pad_id": 0},
    "none, shifted": {"packing": "none", "long_rows": "split", "labels": "shifted", "pad_id": 0},
    "boundaries masked": {"mask_boundaries": True},
}


@pytest.mark.parametrize(("name", "lanes"), [*((name, 1) for name in RUNS), ("best fit", 2)])
def test_states_of_ranks_at_different_places_count_what_all_ranks_got(
    made: Callable[..., Place], name: str, lanes: int
) -> None:
    fields = flat(
        [CODE, DOCS, PROSE, WIKI], last_micro_step="pad", window_micro_steps=12, **RUNS[name]
    )
    for child in epochs(fields, 7)["mixture"]["children"]:
        child["lanes"] = lanes
    served = made(**fields).serve()
    trainer = Trainer(served, RANKS, BATCH)
    # Each rank is further than the one before it, and they come to the end one after the other.
    for rank, lead in zip(trainer.ranks, (0, 1, 3, 6), strict=True):
        rank.take(lead)
    training = list(trainer.ranks)
    while training:
        training = [rank for rank in training if rank.take(1)]
    samples, padded = trainer.taken(), False
    indices = [point.sample_index for point in trainer.ranks[0].history._points]
    assert {320, 328, 336, 344} < set(indices) and indices[-1] == len(samples)
    for index in {*indices[::4], 320, 328, *indices[-2:]}:
        text = trainer.state(index)  # which is the same on every rank
        counts = counts_in(text)
        assert counts == recount(served, samples, index)
        assert sum(count["samples"] for count in counts.values()) == index
        if index % 72 == 0:
            assert served.snapshots.at(index) == (text.decode(), index)
        padded |= any(count["real_tokens"] < count["tokens"] for count in counts.values())
    assert padded == (name not in ("always full", "boundaries masked"))
    # The counters that a restore starts from lag; those in `counts` do not.
    between = unseal(trainer.state(320))["resume_state"]
    assert (
        between["sample_index"] == 288
        and sum(entry["samples"] for entry in between["datasets"]) == 288
    )


def test_rows_of_batches_are_counted(tmp_path: Path) -> None:
    write_features(tmp_path)
    with serving(tmp_path, tmp_path, document(window_micro_steps=12)) as served:
        trainer = Trainer(served, 2, 2)
        samples = trainer.take(100)
        for point in trainer.ranks[0].history._points:
            assert counts_in(trainer.state(point.sample_index)) == recount(
                served, samples, point.sample_index
            )


def test_a_restore_counts_itself_and_refuses_a_difference(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(7)
    text = trainer.state()
    assert trainer.index % 24  # between two boundaries
    counts = counts_in(text)
    for field, value in counts[CODE].items():
        named = {**counts[CODE], field: value + 1}
        expected = rf"counts: {re.escape(repr(CODE))} has .*'{field}': {value + 1}.*"
        expected += rf" to sample 28 gives .*'{field}': {value}"
        with pytest.raises(SnapshotInvalid, match=expected):
            Trainer(served, state=changed(text, counts={**counts, CODE: named}), takeover=True)
    for changes, fault in (
        ({CODE: counts[CODE]}, "has None, but"),
        ({**counts, "more": {"samples": 1}}, "'more' has .* gives None"),
        ({CODE: {"samples": -1}}, r"counts\..*samples: Input should be greater"),
        ([], "counts: Input should be an object"),
        (None, "counts missing"),
    ):
        with pytest.raises(SnapshotInvalid, match=fault):
            Trainer(served, state=changed(text, counts=changes), takeover=True)
    # What was refused has changed nothing.
    again = Trainer(served, state=text, takeover=True)
    assert again.index == 28 and again.take(1)
    assert counts_in(again.state(32)) == recount(served, trainer.taken() | again.taken(), 32)

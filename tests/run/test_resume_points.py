"""Where a generation starts: from a state, the ledger, a snapshot or a restore, with samples skipped or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.corpora import CODE, ROWS, WIKI, mixture
from support.served import Place, Trainer, part, revise, sequence
from tokenloom_proto.seal import canonical, seal, unseal
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    JoinRefused,
    NotFound,
    ResumePointNeeded,
    SnapshotInvalid,
    SourceError,
)


def test_progress_and_nothing_to_resume_from_is_refused_with_the_choices(
    served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(2)
    with pytest.raises(ResumePointNeeded) as refused:
        Trainer(served)
    for word in (
        "sample 8",
        "load_state_dict",
        "resume='latest'",
        "resume='fresh'",
        "snapshot id",
        "a loaded state wins",
    ):
        assert word in str(refused.value)
    # The generation that is there goes on.
    trainer.take(1)


def test_every_resume_point_gives_exactly_what_follows_it(place: Place, served: ServedRun) -> None:
    samples = sequence(served)
    assert Trainer(served, resume="latest").index == 0  # of a run that never began
    trainer = Trainer(served)
    assert trainer.take(7) == part(samples, 0, 28)
    state = trainer.state(12)
    assert served.snapshots.saved_at() is None
    _, saved = served.snapshots.take(17, save=True)
    trainer.train(2)
    for restart, ask, begin in (
        (False, {"resume": "latest"}, 36),
        (True, {"resume": "latest"}, 48),
        (False, {"state": state}, 12),
        (True, {"resume": saved}, 17),
        (False, {"resume": saved}, 17),
        (False, {"resume": "fresh"}, 0),
        (True, {"state": state}, 12),
    ):
        served = place.restart() if restart else served
        assert (served.snapshots.saved_at() or 0) > 1.7e9
        trainer = Trainer(served, world_size=3, batch_size=1, **ask)
        assert trainer.index == place.committed().sample_index == begin
        assert trainer.take(4) == part(samples, begin, begin + 12)
        trainer.settle()


def test_an_unknown_snapshot_id_is_refused_with_those_that_there_are(served: ServedRun) -> None:
    with pytest.raises(NotFound, match=r"run 'test' has no snapshot '9-abc' \(newest: none"):
        Trainer(served, resume="9-abc")
    Trainer(served).take(1)
    _, saved = served.snapshots.take(None, save=True)
    with pytest.raises(NotFound, match=str(saved)):
        Trainer(served, resume="9-abc")


def test_a_state_before_the_first_batch_is_sample_0_of_the_generation(
    served: ServedRun, trainer: Trainer
) -> None:
    state = trainer.state()
    assert state.decode() == served.snapshots.at(0)[0]
    assert Trainer(served, state=state).index == 0
    with pytest.raises(
        JoinRefused, match="brings a loaded state and resume='latest': give one of them"
    ):
        Trainer(served, state=state, resume="latest")


def test_a_state_of_another_run_is_refused(place: Place, trainer: Trainer, tmp_path: Path) -> None:
    trainer.take(2)
    elsewhere = place.serve(tmp_path / "elsewhere.db")
    Trainer(elsewhere)
    with pytest.raises(
        SnapshotInvalid, match=r"the state is of run_uid .* and has progress of its own"
    ):
        Trainer(elsewhere, state=trainer.state())
    with pytest.raises(SnapshotInvalid, match="run_uid"):
        elsewhere.restores.restore(text=trainer.state().decode())


def test_an_empty_ledger_adopts_the_trainers_run(
    place: Place, served: ServedRun, tmp_path: Path
) -> None:
    samples = sequence(served)
    Trainer(served)
    trainer = Trainer(served)
    trainer.take(5)
    state, uid = trainer.state(), served.coordinator.uid
    place.stop()
    elsewhere = place.serve(tmp_path / "elsewhere.db")
    assert elsewhere.coordinator.uid != uid
    moved = Trainer(elsewhere, world_size=1, batch_size=3, state=state)
    assert (elsewhere.coordinator.uid, place.stored().uid) == (uid, uid)
    # Above every generation that the old ledger had when the state was taken.
    assert moved.ranks[0].joined.opening.generation == 3
    assert moved.train(9) == part(samples, 20, 47)
    assert elsewhere.snapshots.at(33)[0].encode() != moved.state()
    assert elsewhere.snapshots.at(47)[0].encode() == moved.state()
    with pytest.raises(BeyondHorizon, match="sample 19 lies before the first state"):
        elsewhere.snapshots.at(19)


def changed(state: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = unseal(state)
    change(document)
    return seal(document).encode()


def moved(document: dict[str, Any], **fields: Any) -> None:
    """The first source's cursor, moved from where it stands; at the beginning there is none yet."""
    entry = document["resume_state"]["datasets"][0]
    beginning = {
        "epoch": 0,
        "shard": "data/code-0.parquet",
        "shard_index": 0,
        "row_offset": 0,
        "row_token_offset": 0,
    }
    entry |= {**beginning, **entry, **fields}


def test_a_state_that_going_forward_does_not_meet_is_refused_before_anything_changes(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(3)
    before = place.written()
    faults: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
        ("gives digest", lambda d: d.update(digest="1" * 32)),
        ("gives digest", lambda d: d["resume_state"].update(digest="1" * 32)),
        (
            "data end at about sample 1",
            lambda d: d.update(sample_index=10**6, total_tokens=8 * 10**6),
        ),
        ("row_offset|rows", lambda d: moved(d, row_offset=10**9)),
        ("token 99999 of row", lambda d: moved(d, row_token_offset=99999)),
    ]
    for says, change in faults:
        for state in (changed(trainer.state(), change), changed(trainer.state(8), change)):
            with pytest.raises((SnapshotInvalid, SourceError), match=says):
                Trainer(served, state=state)
            with pytest.raises((SnapshotInvalid, SourceError), match=says):
                served.restores.restore(text=state.decode())
    assert place.written() == before
    trainer.take(1)


def test_a_cursor_beyond_the_files_is_refused_also_where_there_is_nothing_to_go_forward(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.take(4)
    # A state at a boundary, as a server's opening holds it.
    state = Trainer(served, state=trainer.state()).state()
    document = json.loads(state)
    assert document["sample_index"] == 16
    at_boundary = served.coordinator.timeline.encode(
        served.resume_points.forward(served.resume_points.parse(state))
    )
    document["resume_state"] = json.loads(at_boundary)
    document.pop("checksum")
    assert served.resume_points.parse(seal(document)).base is not None
    before = place.written()
    for field, value in (("row_offset", 15), ("row_offset", 2**53 - 1), ("epoch", 9)):
        damaged = json.loads(canonical(document))
        damaged["resume_state"]["datasets"][0][field] = value
        with pytest.raises(SnapshotInvalid, match=f"resume_state.datasets.0: {field} is {value}"):
            Trainer(served, state=seal(damaged).encode())
    assert place.written() == before


@pytest.mark.parametrize(
    "options", [{"shuffle": "rows", "shuffle_window_rows": 4}, {"lanes": 2}, {}]
)
def test_what_a_source_counts_is_held_against_its_files(
    made: Callable[..., Place], options: dict[str, Any]
) -> None:
    files = ROWS[CODE] if options else ROWS[CODE][:1]
    children = [
        {"source": CODE if options else CODE.replace("*", "0"), "epochs": 3, "weight": 9, **options}
    ]
    served = made(
        mixture={"policy": "least_consumed", "children": [*children, {"source": WIKI}]}
    ).serve()
    trainer = Trainer(served)
    trainer.take(24)
    state = trainer.state(trainer.index)
    entry, of_epoch = datasets(state)[0], sum(map(len, files))
    beyond = of_epoch * (1 + max(lane["epoch"] for lane in entry.get("lanes") or [entry])) + 1
    for field, value, says in (
        ("rows", beyond, f"rows is {beyond}, but it began . epochs of {of_epoch} rows"),
        (
            "bad_rows",
            entry["rows"] + 1,
            f"bad_rows is {entry['rows'] + 1}, but it is a part of rows",
        ),
        ("padding_tokens", entry["token_offset"] + 1, "padding_tokens is"),
    ):

        def forge(document: dict[str, Any], field: str = field, value: int = value) -> None:
            forged = document["resume_state"]["datasets"][0]
            more = value - forged.get(field, 0)
            for counted in [forged, *forged.get("lanes", [])[:1]]:
                counted[field] = counted.get(field, 0) + more

        with pytest.raises(SnapshotInvalid, match=f"resume_state.datasets.0: {says}"):
            Trainer(served, state=changed(state, forge), takeover=True)
    Trainer(served, state=state, takeover=True).take(1)


def test_a_run_whose_source_was_left_fewer_epochs_than_it_had_begun_is_resumed(
    made: Callable[..., Place],
) -> None:
    children = [{"source": CODE, "alias": "code", "epochs": 3, "weight": 9}, {"source": WIKI}]
    served = made(mixture={"policy": "least_consumed", "children": children}).serve()
    revise(served, sample_index=100, set=[{"child": "code", "epochs": 1}])
    trainer = Trainer(served)
    trainer.take(27)
    assert trainer.index == 108 and datasets(trainer.state())[0]["epoch"] == 1
    again = Trainer(served, state=trainer.state(), takeover=True)
    again.take(2)
    assert again.index == 116


def test_a_fork_reads_no_more_of_a_source_that_its_mixture_reads_fewer_times(
    made: Callable[..., Place],
) -> None:
    children = [{"source": CODE, "epochs": 3, "weight": 9}, {"source": WIKI}]
    place = made(mixture={"policy": "least_consumed", "children": children})
    trainer = Trainer(place.serve())
    trainer.take(27)
    assert datasets(trainer.state())[0]["epoch"] == 1
    path = place.path.with_name(f"fork-{place.path.name}")
    once = {"policy": "weighted", "children": [{"source": CODE}, {"source": WIKI}]}
    path.write_text(yaml.safe_dump(mixture(run="fork", mixture=once)))
    fork = Trainer(place.runs.add(path, None), 1, 1, state=trainer.state(), fork=True)
    assert {sample.source for sample in fork.take(10).values()} == {1}


# --- restores --------------------------------------------------------------------------------------


def test_a_restore_pins_the_next_resume_point(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    samples = sequence(served)
    trainer.train(6)
    state = trainer.state(12)
    assert served.restores.restore(sample_index=9).sample_index == 9
    # The generation that is there goes on; the pin survives a restart of the server.
    trainer.take(1)
    served = place.restart()
    with pytest.raises(
        JoinRefused, match=r"a restore pinned sample 9 .* but rank 0 resumes from sample 12"
    ):
        Trainer(served, state=state)
    with pytest.raises(JoinRefused, match="a restore pinned sample 9"):
        Trainer(served, resume="fresh")
    assert Trainer(served).take(2) == part(samples, 9, 17)
    assert place.stored().pin is None
    served.restores.restore(text=state.decode())
    assert Trainer(served, state=state).index == 12


def datasets(text: str | bytes) -> Any:
    return json.loads(text)["resume_state"]["datasets"]


def test_a_restore_names_one_point_that_exists(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.take(1)
    points: list[tuple[dict[str, Any], type[Exception]]] = [
        ({}, ConfigError),
        ({"snapshot_id": "a", "sample_index": 1}, ConfigError),
        ({"text": "{}", "sample_index": 1}, ConfigError),
        ({"snapshot_id": "none"}, NotFound),
        ({"sample_index": 10**6}, BeyondHorizon),
        ({"text": "{}"}, SnapshotInvalid),
    ]
    for point, error in points:
        with pytest.raises(error):
            served.restores.restore(**point)
    assert place.stored().pin is None

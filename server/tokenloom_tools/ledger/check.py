"""What is wrong with a run as a ledger holds it, found without its data: counters, states, openings, revisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenloom_proto.seal import unseal
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import CommittedState, RunContents

from tokenloom_tools.ledger.backup import read_whole

_REMEDY = (
    "Restore the run from a backup (tokenloom ledger restore --replace), or begin an empty ledger and resume from a "
    "trainer's checkpoint"
)

#: Of what is not as servers write it.
_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)


def store_faults(ledger: Ledger) -> Iterator[str]:
    """What is wrong with the store itself, its settings included, a line each, with what to do."""
    looks: tuple[Callable[[], Any], ...] = (ledger.check, ledger.store_faults)
    for look in looks:
        try:
            yield from look() or ()
        except (TokenloomError, *_UNREADABLE) as error:
            yield f"{type(error).__name__}: {error}"


def run_faults(ledger: Ledger, name: str, stream: str) -> Iterator[str]:
    """What is wrong with a run, a line each, with what to do."""
    try:
        contents = read_whole(ledger, name, stream)
        faults = [*_of_lists(contents), *_of_states(contents), *_of_snapshots(contents)]
    except TokenloomError as error:
        yield f"{error.name}: {error}"
        return
    except _UNREADABLE as error:
        faults = [f"it cannot be read: {type(error).__name__}: {error}"]
    yield from (f"run {name!r}, stream {stream}: {fault}. {_REMEDY}" for fault in faults)


def _of_lists(contents: RunContents) -> list[str]:
    run, openings, revisions = contents.run, contents.openings, contents.revisions
    present, world_size = (
        (run.opening.generation, run.opening.world_size) if run.opening is not None else (0, 0)
    )
    index = run.committed.sample_index if run.committed is not None else 0
    generations = [each.generation for each in openings]
    journal = {(entry.generation, entry.sample_index): entry.state for entry in contents.journal}
    # A restore passes over samples from where it goes back to, whatever revisions hold after that.
    places = [
        each.sample_index for each in revisions if "skips" not in (_decoded(each.content) or ())
    ]
    objects = [("record", run.record), ("pin", run.pin or "{}")]
    objects += [(f"revision {each.number}", each.content) for each in revisions]
    for each in openings:
        objects += [
            (f"generation {each.generation}", text or "{}")
            for text in (each.batch_plans, each.parent_run)
        ]
    facts = {
        f"its generations {generations} are out of order, or go on from later ones": generations
        == sorted({each.generation for each in openings if each.parent < each.generation}),
        "its present generation is not the newest": [*openings[-1:]] == [run.opening]
        or run.opening is None,
        "it has a committed state or a present generation, but not both": (run.committed is None)
        == (run.opening is None),
        f"a slot is of a rank beyond its {world_size}": all(
            0 <= rank < world_size for rank in contents.slots
        ),
        "the journal lacks the start of a generation": all(
            journal.get((each.generation, each.start_index)) == each.start_state
            for each in openings
        ),
        "the journal goes beyond the committed sample": all(
            entry <= index for of, entry in journal if of == present
        ),
        "its revisions are not numbered 1, 2, …": [each.number for each in revisions]
        == [*range(1, 1 + len(revisions))],
        f"its revisions, from samples {places} on, are out of order": places == sorted(places),
        f"it has {len(revisions)} revisions, but counts fewer changes": run.revision_changes
        >= len(revisions),
    }
    no_json = [
        f"its {name} holds no JSON object" for name, text in objects if _decoded(text) is None
    ]
    return [*no_json, *(fault for fault, holds in facts.items() if not holds)]


def _of_states(contents: RunContents) -> Iterator[str]:
    """Each state has to lie in a range of sample indices."""
    begins = {opening.generation: opening.start_index for opening in contents.openings}
    states = []
    for entry in contents.journal:  # which has the openings' own
        begin = begins.get(entry.generation, entry.sample_index + 1)
        states.append(
            (
                f"the journal of generation {entry.generation}",
                begin,
                entry.sample_index,
                entry.state,
            )
        )
    committed, opening = contents.run.committed, contents.run.opening
    if committed is not None and opening is not None:
        states.append(
            ("the committed state", opening.start_index, committed.sample_index, committed.state)
        )
    for name, least, most, text in states:
        state = _decoded(text)
        if (
            state is None
            or not {"sample_index", "digest", "total_tokens", "datasets"} <= state.keys()
        ):
            yield f"{name} cannot be decoded"
        elif not least <= state["sample_index"] <= most:
            yield f"{name} has a state of sample index {state['sample_index']}; expected {least} to {most}"
        elif committed is not None and text is committed.state:
            yield from _of_counters(committed, state)
            held = {revision.sample_index for revision in contents.revisions}
            for one in state.get("revisions", ()):
                index = one["sample_index"]
                if (
                    index <= state["sample_index"]
                    and index not in held
                    and "skips" not in one["content"]
                ):
                    yield f"the committed state is under a revision from sample {index} on, and there is none"


def _of_counters(committed: CommittedState, state: dict[str, Any]) -> Iterator[str]:
    """The committed counters are those of the state and of the samples after it."""
    samples = committed.sample_index - state["sample_index"]
    left = {"samples": samples, "rows": 0, "tokens": committed.total_tokens - state["total_tokens"]}
    if not samples and state["digest"] != committed.digest:
        yield f"the committed state has digest {state['digest']}, but {committed.digest} is committed"
    sources = {source["spec"]: source for source in state["datasets"] if not source.get("unknown")}
    others = sources.keys() ^ committed.counters.keys()
    for spec in others:
        yield f"source {spec!r} is in the committed state or has counters, but not both"
    for spec in sources.keys() & committed.counters.keys():
        for name, field in (("samples", "samples"), ("rows", "rows"), ("tokens", "token_offset")):
            # What was passed over is in no counter.
            least = sources[spec].get(field, 0) - sources[spec].get(f"skipped_{name}", 0)
            actual = getattr(committed.counters[spec], name)
            left[name] -= actual - least
            if actual < least or (not samples and actual != least):
                yield f"source {spec!r} has {actual} committed {name}, but its state says {least}"
    if not others and (left["samples"] or left["tokens"]):
        yield f"of the samples and tokens after the committed state, {left} are in no source's counters"


def _of_snapshots(contents: RunContents) -> Iterator[str]:
    for snapshot in contents.snapshots:
        expected = [contents.run.name, contents.run.stream, snapshot.sample_index]
        try:
            actual = [
                unseal(snapshot.text).get(field) for field in ("run", "stream", "sample_index")
            ]
            if actual != expected:
                yield f"snapshot {snapshot.id} is of {actual}; expected {expected}"
        except ValueError as error:
            yield f"snapshot {snapshot.id}: {error}"


def _decoded(text: str) -> dict[str, Any] | None:
    """A JSON object; None where the text is none."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None

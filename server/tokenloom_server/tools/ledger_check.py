"""What is wrong with a run as a ledger holds it, found without its data: counters, states, openings, revisions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenloom_proto.seal import unseal

from tokenloom_server.errors import LedgerError, TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.records import CommittedState, RunContents
from tokenloom_server.tools.ledger_backup import read_whole

_REMEDY = (
    "Restore the run from a backup (tokenloom ledger restore --replace), or begin an empty ledger and resume from a "
    "trainer's checkpoint"
)


def store_faults(ledger: Ledger) -> Iterator[str]:
    """What is wrong with the store itself, its settings included, a line each, with what to do."""
    try:
        ledger.check()
    except LedgerError as error:
        yield f"{error.name}: {error}"
    yield from ledger.store_faults()


def run_faults(ledger: Ledger, name: str, stream: str) -> Iterator[str]:
    """What is wrong with a run, a line each, with what to do."""
    try:
        contents = read_whole(ledger, name, stream)
        faults = [*_of_lists(contents), *_of_states(contents), *_of_snapshots(contents)]
    except TokenloomError as error:
        yield f"{error.name}: {error}"
    else:
        for fault in faults:
            yield f"run {name!r}, stream {stream}: {fault}. {_REMEDY}"


def _of_lists(contents: RunContents) -> list[str]:
    run, openings, revisions = contents.run, contents.openings, contents.revisions
    present, world_size = (run.opening.generation, run.opening.world_size) if run.opening is not None else (0, 0)
    index = run.committed.sample_index if run.committed is not None else 0
    generations = [each.generation for each in openings]
    started = {(entry.generation, entry.sample_index): entry.state for entry in contents.journal}
    changed = [_decoded(each.content) for each in revisions]
    # A restore passes over samples from where it goes back to, whatever revision lies after that.
    places = [one.sample_index for one, what in zip(revisions, changed, strict=True) if "skips" not in (what or ())]
    facts = {
        "its record is no JSON object": _decoded(run.record) is not None,
        "its pin is no JSON object": _decoded(run.pin or "{}") is not None,
        f"its generations {generations} are out of order, or go on from later ones": generations
        == sorted({each.generation for each in openings if each.parent < each.generation}),
        "an attempt opened two generations": len({opening.attempt for opening in openings}) == len(openings),
        "its present generation is not the newest": [*openings[-1:]] == [run.opening] or run.opening is None,
        "it has a committed state or a present generation, but not both": (run.committed is None)
        == (run.opening is None),
        "it has generations, but no server epoch": run.epoch > 0 or not openings,
        "a rank has a slot that its generation does not have": all(0 <= rank < world_size for rank in contents.slots),
        "its journal lacks a generation's start, or has another one there": all(
            started.get((each.generation, each.start_index)) == each.start_state for each in openings
        ),
        "its journal goes beyond what is committed": all(at <= index for of, at in started if of == present),
        "its revisions have other numbers than 1, 2, …": [each.number for each in revisions]
        == [*range(1, len(revisions) + 1)],
        f"its revisions are out of order: they hold from samples {places} on": places == sorted(places),
        "a revision is no JSON object": None not in changed,
        f"it has {len(revisions)} revisions, but counts fewer changes": run.revision_changes >= len(revisions),
    }
    return [fault for fault, holds in facts.items() if not holds]


def _of_states(contents: RunContents) -> Iterator[str]:
    """Each state has to lie in a range of sample indices."""
    begins = {opening.generation: opening.start_index for opening in contents.openings}
    texts = [(f"the opening of generation {each.generation}", each, each.start_state) for each in contents.openings]
    states = [(name, each.start_index, each.start_index, text) for name, each, text in texts]
    for entry in contents.journal:
        begin = begins.get(entry.generation, entry.sample_index + 1)
        states.append((f"the journal of generation {entry.generation}", begin, entry.sample_index, entry.state))
    committed, opening = contents.run.committed, contents.run.opening
    if committed is not None and opening is not None:
        states.append(("the committed state", opening.start_index, committed.sample_index, committed.state))
    for name, least, most, text in states:
        state = _decoded(text)
        if state is None or not {"sample_index", "digest", "total_tokens", "datasets"} <= state.keys():
            yield f"{name} cannot be decoded"
        elif not least <= state["sample_index"] <= most:
            yield f"{name} has a state of sample index {state['sample_index']}; expected {least} to {most}"
        elif committed is not None and text is committed.state:
            yield from _of_counters(committed, state)
            held = {revision.sample_index for revision in contents.revisions}
            for one in state.get("revisions", ()):
                if (
                    one["sample_index"] <= state["sample_index"]
                    and one["sample_index"] not in held
                    and "skips" not in one["content"]
                ):
                    yield f"the committed state is under a revision from sample {one['sample_index']} on, which is not there"


def _of_counters(committed: CommittedState, state: dict[str, Any]) -> Iterator[str]:
    """The committed counters are those of the state, or of samples after it."""
    is_same = state["sample_index"] == committed.sample_index
    if is_same and (state["digest"], state["total_tokens"]) != (committed.digest, committed.total_tokens):
        yield f"the committed state has digest {state['digest']}, but {committed.digest} is committed"
    sources = {source["spec"]: source for source in state["datasets"] if not source.get("unknown")}
    for spec in sources.keys() ^ committed.counters.keys():
        yield f"source {spec!r} is in the committed state or has counters, but not both"
    moved = {"samples": 0, "rows": 0, "tokens": 0}
    for spec in sources.keys() & committed.counters.keys():
        for name, field in (("samples", "samples"), ("rows", "rows"), ("tokens", "token_offset")):
            # What was passed over is in no counter.
            least = sources[spec].get(field, 0) - sources[spec].get(f"skipped_{name}", 0)
            actual = getattr(committed.counters[spec], name)
            moved[name] += actual - least
            if actual < least or (is_same and actual != least):
                yield f"source {spec!r} has {actual} committed {name}, but its state says {least}"
    samples, tokens = committed.sample_index - state["sample_index"], committed.total_tokens - state["total_tokens"]
    if sources.keys() == committed.counters.keys() and (moved["samples"], moved["tokens"]) != (samples, tokens):
        yield (
            f"{samples} samples and {tokens} tokens are committed after the committed state, but its sources count "
            f"{moved['samples']} and {moved['tokens']}"
        )


def _of_snapshots(contents: RunContents) -> Iterator[str]:
    for snapshot in contents.snapshots:
        try:
            if unseal(snapshot.text).get("sample_index") != snapshot.sample_index:
                yield f"snapshot {snapshot.id} is kept as of sample index {snapshot.sample_index}, but is of another"
        except ValueError as error:
            yield f"snapshot {snapshot.id}: {error}"


def _decoded(text: str) -> dict[str, Any] | None:
    """A JSON object; None where the text is none."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None

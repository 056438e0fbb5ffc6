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
    except TokenloomError as error:
        yield f"{error.name}: {error}"
    else:
        for fault in (*_of_lists(contents), *_of_states(contents), *_of_snapshots(contents)):
            yield f"run {name!r}, stream {stream}: {fault}. {_REMEDY}"


def _of_lists(contents: RunContents) -> list[str]:
    run, openings, revisions = contents.run, contents.openings, contents.revisions
    generations = [opening.generation for opening in openings]
    places = [revision.sample_index for revision in revisions]
    facts = {
        "its record is no JSON object": _decoded(run.record) is not None,
        "its pin is no JSON object": _decoded(run.pin or "{}") is not None,
        f"its generations {generations} are out of order, or go on from later ones": generations
        == sorted({each.generation for each in openings if each.parent < each.generation}),
        "an attempt opened two generations": len({opening.attempt for opening in openings}) == len(openings),
        "its present generation is not the newest": [*openings[-1:]] == [run.opening] or run.opening is None,
        "it has a committed state or a present generation, but not both": (run.committed is None)
        == (run.opening is None),
        "its revisions are out of order": [each.number for each in revisions] == [*range(1, len(places) + 1)]
        and places == sorted(places),
        "a revision is no JSON object": all(_decoded(revision.content) is not None for revision in revisions),
        f"it has {len(places)} revisions, but counts fewer changes": run.revision_changes >= len(places),
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


def _of_counters(committed: CommittedState, state: dict[str, Any]) -> Iterator[str]:
    """The committed counters are those of the state, or of samples after it."""
    is_same = state["sample_index"] == committed.sample_index
    if is_same and (state["digest"], state["total_tokens"]) != (committed.digest, committed.total_tokens):
        yield f"the committed state has digest {state['digest']}, but {committed.digest} is committed"
    sources = {source["spec"]: source for source in state["datasets"] if not source.get("unknown")}
    for spec in sources.keys() ^ committed.counters.keys():
        yield f"source {spec!r} is in the committed state or has counters, but not both"
    for spec in sources.keys() & committed.counters.keys():
        for name, field in (("samples", "samples"), ("rows", "rows"), ("tokens", "token_offset")):
            # What was passed over is in no counter.
            least = sources[spec].get(field, 0) - sources[spec].get(f"skipped_{name}", 0)
            actual = getattr(committed.counters[spec], name)
            if actual < least or (is_same and actual != least):
                yield f"source {spec!r} has {actual} committed {name}, but its state says {least}"


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

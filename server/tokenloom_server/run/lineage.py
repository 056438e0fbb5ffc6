"""Which generations the samples of a run are of: the present one, the one that it went on from, and so on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenloom_server.core.state import State
from tokenloom_server.errors import NotFound
from tokenloom_server.ledger.records import Opening
from tokenloom_server.order.timeline import Timeline


class NearestState(NamedTuple):
    """A state to go forward from to a sample index."""

    state: State
    #: The one that the state is of; 0 where the ledger has none that far back.
    generation: int
    #: Up to there samples were delivered, as far as the ledger can tell, so that any of them may be asked for.
    reach: int
    #: The order that the generation saw.
    timeline: Timeline


def lineage(openings: Sequence[Opening], generation: int | None = None) -> Iterator[Opening]:
    """A generation (None: the present one), the one that it went on from, and so on to the first. Raises ``NotFound``
    for a generation that the ledger does not have."""
    by_number = {opening.generation: opening for opening in openings}
    if generation is not None and generation not in by_number:
        known = f"{min(by_number)} to {max(by_number)}" if by_number else "none: no trainer has joined yet"
        raise NotFound(f"there is no generation {generation}; the ledger has {known}")
    if generation is None and openings:
        generation = openings[-1].generation
    opening = by_number.get(generation or 0)
    while opening is not None:
        yield opening
        opening = by_number.get(opening.parent)


def covering(openings: Sequence[Opening], index: int, generation: int | None = None) -> Opening | None:
    """The generation in whose part of the run's lineage a sample index lies: the present one (or the one given) from
    its start on, before that its parent, and so on. Raises ``NotFound`` for a generation that the ledger does not have.
    """
    return next((opening for opening in lineage(openings, generation) if index >= opening.start_index), None)


def with_samples(openings: Sequence[Opening]) -> list[Opening]:
    """The generations that the run's samples are of, oldest first: the lineage of the present one, without those of
    which nothing is left."""
    kept: list[Opening] = []
    for opening in lineage(openings):
        if not kept or opening.start_index < kept[-1].start_index:
            kept.append(opening)
    return kept[::-1]

"""Digests of what happens in the simulated worlds: as long as they are those of ``tests/golden``, servers and trainers
do the same as before, at the same time, in every world.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.simulation.scheduler import Violation
from tests.simulation.world import World

FILE = Path(__file__).resolve().parents[1] / "golden" / "worlds.json"
#: Seeds of the worlds that are run each time, in chunks; each chunk has a digest.
WORLDS, CHUNK = 1000, 50
#: Events whose second detail is for people: an error's message.
_WITH_MESSAGE = frozenset({"not joined", "stream ended", "failed", "cannot start", "no revision"})


class Events:
    """The digest of the events of worlds, one after the other. Plans and messages, which are texts, are left out."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, world: World) -> None:
        for time, who, what, details in world.log:
            shown = details[:1] if what in _WITH_MESSAGE else details if what != "plan" else ()
            self._hash.update(f"{time:.4f}|{who}|{what}|{shown}\n".encode())
        self._hash.update(f"{world.checker.samples} samples\n".encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:16]


def run(
    seeds: Iterable[int], look: Callable[[World], None] = lambda world: None
) -> tuple[list[str], str]:
    """What was violated in the worlds of some seeds, and the digest of their events. ``look`` gets each world."""
    faults, events = [], Events()
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Violation as violation:
            faults.append(f"seed {seed}: {violation}")
        events.add(world)
        look(world)
    return faults, events.digest


def chunks() -> list[range]:
    return [range(first, first + CHUNK) for first in range(0, WORLDS, CHUNK)]


def written() -> dict[int, str]:
    """The digest of each chunk, by its first seed."""
    return {
        int(first): digest for first, digest in json.loads(FILE.read_text(encoding="utf-8")).items()
    }


def write() -> None:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        digests = {
            seeds.start: digest
            for seeds, (_, digest) in zip(chunks(), pool.map(run, chunks()), strict=True)
        }
    FILE.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")

"""A story: so many faults on one world, drawn from a seed; then the end, the reference and the check.

The seed decides which faults come in which order with which parameters. When exactly they strike is the machine's
doing, as it is in life.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos.checker import Findings, check
from chaos.faults import FAULTS, Fault
from chaos.world import LivenessFailed, World, reference


@dataclass(frozen=True)
class Kind:
    """A kind of world, and its share of all faults: such that all take about as long side by side."""

    name: str
    ledger: str
    servers: int
    share: float


WORLDS = (
    Kind("standby", "redis", 2, 0.34),
    Kind("redis", "redis", 1, 0.36),
    Kind("sqlite", "sqlite", 1, 0.3),
)

#: How often a second fault, and then a third, begins while the first is there.
AGAIN = 0.25


@dataclass
class Story:
    """What happened. ``recoveries_s``: from the end of each fault until every rank had a batch made after it."""

    seed: str
    faults: Counter[str] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0
    final_index: int = 0

    @property
    def count(self) -> int:
        return self.faults.total()


def tell(
    folder: Path,
    corpus: Path,
    seed: str,
    faults: int,
    *,
    ledger: str,
    servers: int = 1,
    only: str = "",
    mutant: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> Story:
    """Runs a story. ``only``: faults whose names contain that. Raises ``CheckFailed`` or ``LivenessFailed``."""
    began = time.monotonic()
    story = Story(seed)
    world = World(folder, corpus, seed, ledger=ledger, servers=servers, mutant=mutant)
    there = {
        name
        for name, is_there in (("redis", ledger == "redis"), ("standby", servers > 1))
        if is_there
    }
    known = [each for each in FAULTS if only in each.name and there.issuperset(each.needs.split())]
    try:
        for server in world.servers:
            server.start()
        older = json.dumps({"sample_index": 0, "total_tokens": world.clock}) if world.clock else ""
        world.launch(random.Random(f"{seed}/first"), state=older, start=0)
        world.wait_states(1)
        world.recover()
        number = 0
        while story.count < faults:
            draw = random.Random(f"{seed}/{number}")
            chosen = _choose(draw, known)
            names = " + ".join(each.name for each in chosen)
            try:
                with ExitStack() as healing:
                    for each in chosen:
                        healing.enter_context(each.begin(world, draw))
                        world.pause(draw.choice((0, 0, 0.05, 0.3)))
                recovered_s = max(world.recover(), world.takeover_s or 0.0)
                world.takeover_s = None
                world.clear_up()
                world.check_ledger()
            except LivenessFailed as error:
                raise LivenessFailed(f"fault {number} of seed {seed} ({names}): {error}") from error
            story.faults.update(each.name for each in chosen if each.name not in world.missed)
            world.missed.clear()
            story.recoveries_s.append(recovered_s)
            elapsed = time.monotonic() - began
            progress(
                f"{elapsed:7.1f} s  fault {story.count:4d}/{faults}  recovered in {recovered_s:5.2f} s  {names}"
            )
            number += 1
        story.final_index = world.finish()
        world.check_ledger()
        world.check_logs()
    finally:
        world.close()
    skipped = sum(samples for _, samples in world.skips)
    reference(folder, world.mixture, max(launch.reach() for launch in world.launches) + skipped)
    story.findings = check(folder, story.final_index)
    story.findings.raise_if_wrong()
    story.seconds = time.monotonic() - began
    return story


def _choose(draw: random.Random, known: Sequence[Fault]) -> list[Fault]:
    """One fault, or several that concern different things."""
    chosen = draw.choices(known, [each.weight for each in known])
    while len(chosen) < 3 and draw.random() < AGAIN and chosen[0].resource != "all":
        taken = {each.resource for each in chosen} | {"all"}
        free = [each for each in known if each.resource not in taken]
        if not free:
            break
        chosen += draw.choices(free, [each.weight for each in free])
    return chosen


def quantile(values: Sequence[float], of: float) -> float:
    """The value that a share of all values is at most; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(of * len(ordered)))] if ordered else 0.0

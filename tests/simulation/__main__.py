"""``python -m tests.simulation SEED`` replays one world with its events; ``--worlds N`` runs N of them.

``--write`` writes down the digests of what happens in the worlds that the tests run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tests.simulation import events
from tests.simulation.scheduler import Violation
from tests.simulation.world import World

app = typer.Typer(add_completion=False)
#: Worlds that a process takes at once.
_AT_ONCE = 20


@app.command()
def main(
    seed: Annotated[int, typer.Argument(help="the world to replay, or the first of --worlds")] = 0,
    worlds: Annotated[int, typer.Option(help="how many worlds to run, from that seed on")] = 0,
    write: Annotated[
        bool, typer.Option("--write", help="write down the digests of the tests' worlds")
    ] = False,
) -> None:
    """Replays one world and prints its events, or runs many and prints the seeds that failed."""
    if write:
        events.write()
        raise typer.Exit
    if worlds:
        raise typer.Exit(run_many(range(seed, seed + worlds)))
    raise typer.Exit(replay(seed))


def replay(seed: int) -> int:
    """Prints every event of a world; 1 where a promise was broken in it."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    world = World(seed)
    found = broken(world)
    for time, who, what, details in world.log:
        console.print(f"{time:10.4f}  {who:18}  {what}", *details)
    console.print(
        f"seed {seed}: {found or 'every promise was kept'}; {world.checker.samples} samples were compared"
    )
    return 1 if found else 0


def run_many(seeds: Iterable[int]) -> int:
    """Runs worlds on all cores; the number of those that failed, 100 at most."""
    faults: list[str] = []
    samples = 0
    every = list(seeds)
    with Progress() as progress, ProcessPoolExecutor(os.cpu_count()) as pool:
        task = progress.add_task("worlds", total=len(every))
        for seed, found, compared in pool.map(_one, every, chunksize=_AT_ONCE):
            progress.advance(task)
            samples += compared
            if found is not None:
                faults.append(f"seed {seed}: {found}")
                progress.console.print(faults[-1])
    Console().print(
        f"{len(every)} worlds, {samples} samples compared, {len(faults)} worlds with a fault"
    )
    return min(len(faults), 100)


def broken(world: World) -> str | None:
    """Runs a world; what was violated in it."""
    try:
        world.run()
    except Violation as violation:
        return str(violation)
    return None


def _one(seed: int) -> tuple[int, str | None, int]:
    world = World(seed)
    return seed, broken(world), world.checker.samples


if __name__ == "__main__":
    app()

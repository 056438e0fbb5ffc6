"""The long form: ``make chaos``. Prints one line per fault, the figures at the end, and how to replay what failed."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos.corpus import write_corpus
from chaos.story import WORLDS, Kind, Story, quantile, tell


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", default="", help="replays; a new one if not given")
    parser.add_argument("--faults", type=int, default=1000, help="in all, over all worlds")
    parser.add_argument(
        "--world", choices=("all", *(world.name for world in WORLDS)), default="all"
    )
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument(
        "--mutant", default="", help="a check to remove from the server: fence or deduplication"
    )
    parser.add_argument(
        "--folder", type=Path, help="where all files go; a temporary one if not given"
    )
    parser.add_argument("--figures", type=Path, help="write the figures there, as JSON")
    asked = parser.parse_args()
    seed = asked.seed or secrets.token_hex(4)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="tokenloom-chaos-"))
    chosen = {"SEED": seed, "FAULTS": str(asked.faults), "WORLD": asked.world, "ONLY": asked.only}
    replay = " ".join(
        ["make chaos", *(f"{name}={value}" for name, value in chosen.items() if value)]
    )
    print(f"seed {seed}; files in {folder}; replay with: {replay}", flush=True)
    corpus = write_corpus(folder / "corpus")
    chosen_worlds = [world for world in WORLDS if asked.world in ("all", world.name)]
    began = time.monotonic()

    def run(world: Kind) -> Story:
        faults = round(asked.faults * world.share) if asked.world == "all" else asked.faults
        return tell(
            folder / world.name,
            corpus,
            f"{seed}-{world.name}",
            faults,
            ledger=world.ledger,
            servers=world.servers,
            only=asked.only,
            mutant=asked.mutant,
            progress=lambda line: print(f"{world.name:8s} {line}", flush=True),
        )

    stories: list[Story] = []
    with ThreadPoolExecutor() as pool:
        for world, future in [(world, pool.submit(run, world)) for world in chosen_worlds]:
            try:
                stories.append(future.result())
            except AssertionError as error:
                print(f"\nFAILED in the world {world.name!r}: {error}", file=sys.stderr, flush=True)
    if len(stories) < len(chosen_worlds):
        print(f"\nFAILED; files in {folder}; replay with: {replay}", file=sys.stderr, flush=True)
        return 1
    faults: Counter[str] = sum((story.faults for story in stories), Counter())
    recoveries_s = [each for story in stories for each in story.recoveries_s]
    figures = {
        "seed": seed,
        "faults": faults.total(),
        "by_kind": dict(sorted(faults.items())),
        "attempts": sum(story.findings.attempts for story in stories),
        "samples_delivered": sum(story.findings.delivered for story in stories),
        "samples_distinct": sum(story.findings.distinct for story in stories),
        "ledger_observations": sum(story.findings.observations for story in stories),
        "states": sum(story.findings.states for story in stories),
        "recovery_s": {
            name: round(quantile(recoveries_s, q), 2)
            for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        },
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(figures, indent=2))
    if asked.figures is not None:
        asked.figures.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if asked.folder is None:
        shutil.rmtree(folder)
    print(f"passed: {faults.total()} faults, nothing lost, repeated or reordered")
    return 0


if __name__ == "__main__":
    sys.exit(main())

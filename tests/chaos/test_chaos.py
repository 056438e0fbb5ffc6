"""The short form of the chaos suite, and proof that it can fail: a server that lacks a check does not pass it.

A failing story prints its seed; ``CHAOS_SEED=… pytest tests/chaos`` tells it again.
"""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos.corpus import write_corpus
from chaos.story import WORLDS, Kind, Story, tell

#: In all worlds together.
FAULTS = 100


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("numbered"))


@pytest.mark.slow
def test_a_hundred_faults_lose_repeat_and_reorder_nothing_and_training_goes_on_behind_each(
    corpus: Path, tmp_path: Path
) -> None:
    seed = os.environ.get("CHAOS_SEED") or secrets.token_hex(4)
    print(f"CHAOS_SEED={seed}")

    def run(world: Kind) -> Story:
        return tell(
            tmp_path / world.name,
            corpus,
            f"{seed}-{world.name}",
            round(FAULTS * world.share),
            ledger=world.ledger,
            servers=world.servers,
            progress=lambda line: print(f"{world.name:8s} {line}"),
        )

    with ThreadPoolExecutor() as pool:
        stories = list(pool.map(run, WORLDS))
    assert sum(story.count for story in stories) >= FAULTS
    for story in stories:
        assert story.findings.distinct > 1000
        assert story.findings.observations > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "only", "message"),
    [
        # Where the job ends before it is as far as the older commit, the ledger does not end where the job does.
        (
            "fence",
            "late-commit-of-an-older-launch",
            "the ledger .* beyond sample|the last commit did not happen",
        ),
        # Whoever sees the commits go back: the checker, or the server, which takes it for lost data.
        ("deduplication", "late-commit", "the ledger .* went back from sample|LedgerRolledBack"),
    ],
)
def test_a_ledger_without_a_check_is_caught(
    corpus: Path, tmp_path: Path, mutant: str, only: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        tell(
            tmp_path / mutant,
            corpus,
            mutant,
            3,
            ledger="redis",
            only=only,
            mutant=mutant,
            progress=print,
        )

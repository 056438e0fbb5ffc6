"""docs/how-we-know.md says of the long form what its kept figures say, and those are of whole runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from chaos.faults import group_of

HERE = Path(__file__).resolve().parent
PAGE = (HERE.parent.parent / "docs" / "how-we-know.md").read_text(encoding="utf-8")
FIGURES = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((HERE / "figures").glob("*.json"))
]


def test_three_runs_of_the_long_form_with_different_seeds_are_kept() -> None:
    assert len({each["seed"] for each in FIGURES}) == 3
    assert all(
        each["faults"] >= 1000 and sum(each["by_kind"].values()) == each["faults"]
        for each in FIGURES
    )


def test_the_page_says_how_many_faults_of_each_kind_there_were() -> None:
    by_group: Counter[str] = Counter()
    for each in FIGURES:
        for name, count in each["by_kind"].items():
            by_group[group_of(name)] += count
    said = ", ".join(f"{group}: {count:,}" for group, count in by_group.most_common())
    assert said in " ".join(PAGE.split()), f"docs/how-we-know.md lacks: {said}"


def test_the_page_shows_them() -> None:
    for each in FIGURES:
        row = (
            f"| `{each['seed']}` | {each['faults']:,} | {each['attempts']:,} | {each['samples_delivered']:,} | "
            f"{each['ledger_observations']:,} | {each['recovery_s']['p50']:.2f} s | {each['recovery_s']['p99']:.2f} s |"
        )
        assert row in PAGE, f"docs/how-we-know.md lacks the row of tests/chaos/figures: {row}"

"""Dataset cards of strangers: each a clear error, soon, in little memory, and never the end of the process."""

from __future__ import annotations

from pathlib import Path

from support.hostile import cards, outcome_of


def test_hostile_cards_end_in_a_clear_error_in_little_memory(tmp_path: Path) -> None:
    outcome = outcome_of("configs_of(path.read_text(encoding='utf-8'))", cards(), tmp_path)
    for name, error in outcome.errors.items():
        assert error.startswith("its card"), name
        assert len(error) < 1000, name
    assert outcome.peak_mib < 200
    assert outcome.errors["lists in lists"] == "its card's header: line 1: nested deeper than 100 levels"
    assert "line 6: more than 200,000 values" in outcome.errors["aliases of aliases"]

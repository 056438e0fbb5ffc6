"""Tokenisers of strangers: each a clear error, soon, in little memory, before an engine makes room for its ids."""

from __future__ import annotations

from pathlib import Path

from support.hostile import outcome_of, tokenizers


def test_hostile_tokenizers_end_in_a_clear_error_in_little_memory(tmp_path: Path) -> None:
    outcome = outcome_of(
        "from tokenloom_server.tokenizer.definition import find_tokenizer; find_tokenizer(path.name, path.parent)",
        tokenizers(),
        tmp_path,
    )
    for name, error in outcome.errors.items():
        assert error.startswith("tokenizer 'tokenizer.json': "), name
        assert len(error) < 1000, f"{name}: {error[:1000]}"
    assert outcome.peak_mib < 200
    assert "has the id 4294967295; expected at most 4194303" in outcome.errors["BPE with the id 4294967295"]
    assert "is not JSON" in outcome.errors["lists in lists"]


def test_a_config_beside_a_tokenizer_is_held_to_the_same(tmp_path: Path) -> None:
    beside = {name: text for name, text in tokenizers().items() if "id" not in name}
    call = (
        "from tokenloom_server.tokenizer.definition import _named_beside; "
        "(path.parent / 'tokenizer_config.json').write_bytes(path.read_bytes()); _named_beside(path, {})"
    )
    for name, error in outcome_of(call, beside, tmp_path).errors.items():
        assert "tokenizer_config.json: cannot be read (" in error and len(error) < 1000, name

"""What users see and have stored is what it was: ``tests/golden`` holds it, ``support/goldens.py`` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.goldens import FOLDER, GOLDENS


@pytest.mark.parametrize("name", GOLDENS)
def test_what_is_written_now_is_what_was_written_then(name: str, tmp_path: Path) -> None:
    for file, text in GOLDENS[name](tmp_path).items():
        assert text == (FOLDER / file).read_text(encoding="utf-8"), (
            f"{file}: is it meant? 'make goldens' writes it anew"
        )

"""A corpus that is only read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import write_corpus


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("replayed"))

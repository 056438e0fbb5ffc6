"""The corpus that most tests of the order read, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import write_corpus


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that write nothing into it."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))

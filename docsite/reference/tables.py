"""The tables that stand in pages, between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from docsite.reference import commands, errors, metrics, mixture_file
from docsite.repository import ROOT

#: By their names; those for which a server answers are ``tests.support.doc_tables``'s.
TABLES: dict[str, Callable[[], str]] = {
    "commands": commands.overview,
    "errors": errors.errors,
    "metrics": metrics.metrics,
    **mixture_file.tables(),
}
_PLACE = re.compile(
    r"^<!-- table: (?P<name>[\w ]+) -->\n.*?^<!-- end -->\n", re.DOTALL | re.MULTILINE
)


def pages() -> dict[Path, list[str]]:
    """The pages that have tables, with the tables' names."""
    names = {
        page: _PLACE.findall(page.read_text(encoding="utf-8"))
        for folder in ("docs", "tests/conformance")
        for page in sorted((ROOT / folder).rglob("*.md"))
    }
    return {page: named for page, named in names.items() if named}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with its tables as they are to be."""
    return _PLACE.sub(
        lambda place: f"<!-- table: {place['name']} -->\n{tables[place['name']]()}<!-- end -->\n",
        page,
    )

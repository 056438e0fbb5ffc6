"""Texts of the program as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table with a line for each row; what is in a cell is on one line."""
    head = list(columns)
    lines = (head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def prose(text: str) -> str:
    """A docstring or description as Markdown: its code spans with one backtick, its pages of ``docs/`` as links."""
    spans = text.replace("``", "`")
    return re.sub(
        r"`?docs/([\w/-]+\.md(?:#[\w-]+)?)`?", lambda page: f"[{page[1]}]({page[1]})", spans
    )

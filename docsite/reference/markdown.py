"""Texts of the program as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from docsite.repository import ROOT


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table with a line for each row; what is in a cell is on one line."""
    head = list(columns)
    lines = (head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def entries(items: Iterable[tuple[str, str, str]]) -> str:
    """A list of names, each with a remark in brackets and a text: for texts that are too long for a table's cells."""
    return "".join(
        f"- {name}{f' ({remark})' if remark else ''}: {' '.join(text.split())}\n"
        for name, remark, text in items
    )


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def prose(text: str) -> str:
    """A docstring or description as Markdown: its code spans with one backtick, its pages of ``docs/`` as links."""
    spans = text.replace("``", "`")
    return re.sub(r"`?docs/([\w/-]+\.md(?:#[\w-]+)?)`?", lambda page: link(page[1]), spans)


def link(target: str, here: str = "") -> str:
    """A link to a page of ``docs/``, or to a place in it, by its heading. ``here``: the page of a place without one."""
    page, _, anchor = target.partition("#")
    text = (ROOT / "docs" / (page or here)).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    heading = next(each for each in headings if not anchor or _anchor(each) == anchor)
    return f"[{heading.partition(':')[0] if not anchor else heading}]({target})"


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

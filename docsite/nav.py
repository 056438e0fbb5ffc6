"""The site's navigation, made of the index ``docs/README.md``: its headings are the sections, its links the pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from docsite.repository import links_of_site

INDEX = "README.md"
_HEADING_OR_LINK = re.compile(
    r"^(?P<level>##+) (?P<heading>.+)$|\[(?P<text>[^]]+)\]\((?P<page>[\w./-]+\.md)\)", re.M
)


def nav_of(index: str) -> list[Any]:
    """The index as MkDocs wants a navigation: pages by their titles, within the sections of the second and third level.

    A page stands where a section names it first. A link whose text is a file's name has the page's own title. A section
    of one page of the same name is that page.
    """
    nav: list[Any] = [INDEX]
    levels: dict[int, list[Any]] = {1: nav}
    seen = {INDEX}
    for match in _HEADING_OR_LINK.finditer(links_of_site(index, INDEX)):
        if match["heading"]:
            level = len(match["level"])
            levels = {above: entries for above, entries in levels.items() if above < level} | {
                level: []
            }
            levels[max(levels.keys() - {level})].append({match["heading"]: levels[level]})
        elif match["page"] not in seen and max(levels) > 1:
            seen.add(match["page"])
            # MkDocs shows titles as they are.
            text = match["text"].replace("`", "")
            title = text[0].upper() + text[1:]
            entry = match["page"] if title.endswith(".md") else {title: match["page"]}
            levels[max(levels)].append(entry)
    return list(_without_needless(nav))


def _without_needless(entries: Iterable[Any]) -> Iterable[Any]:
    """Entries without sections that have no page, or only the one of their own name."""
    for entry in entries:
        if not isinstance(entry, dict) or isinstance(pages := next(iter(entry.values())), str):
            yield entry
            continue
        (heading,) = entry
        if pages := list(_without_needless(pages)):
            yield pages[0] if len(pages) == 1 and heading in pages[0] else {heading: pages}
